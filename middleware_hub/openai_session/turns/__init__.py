"""A turn on its way: asked for, relayed, recorded, repeated."""
