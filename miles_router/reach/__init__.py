"""`miles-router reach URL`: what an agent outside will find on the way to the router.

route.py     `POST /reach`, the router's side: echoes, delays and streams as asked
command.py   the command, which asks it from outside; only the standard library
"""
