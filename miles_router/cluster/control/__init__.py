"""One fleet of several processes: a control plane that decides, and data processes that follow it.

channel    messages between the control plane and one data process
peer_loads requests in flight of other processes, and choosing by them
senders    which processes send requests
state      what the control plane decides, written and followed
pools      the pool of who decides, and that of who follows
plane      the control plane's duty
followers  the data processes as the control plane sees them
data       a data process's duty
"""
