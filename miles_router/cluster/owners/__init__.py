"""Which process of a router has which session, and requests that are forwarded there.

forwarding  a request that another process answers, over HTTP
ownership   what the edge and layers ask: whose a name is, and what all others have
held_names  what a process held, for the one that comes after it
"""
