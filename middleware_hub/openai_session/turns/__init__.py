"""A turn on its way: taken in, relayed, recorded, given again."""
