"""All settings of the router, their types, and where their values come from."""
