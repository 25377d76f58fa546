"""Which process of a router has which session or text, and how a client's connection gets there.

links       packets from process to process, with descriptors beside them
handover    connections as such packets
asking      requests that one process asks of another
ownership   what layers ask: whose a name or a text is
held_names  what a process held, for the one that comes after it
texts       where texts belong
roots       the directory by which that is known
"""
