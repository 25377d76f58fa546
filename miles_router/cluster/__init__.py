"""One router on several processes: a control plane that decides, and data processes that follow it.

duty      what one process does of a router; by default all of it
channel   messages between the control plane and one data process
table     requests in flight of all processes, in shared memory
state     what the control plane decides, written and followed
control   the control plane's duty, and its followers
data      a data process's duty, and its replica of the fleet
numbers   the numbers of all processes as one
"""
