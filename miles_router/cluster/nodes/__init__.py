"""One router on several machines.

leases      who may act for a slot, and until when
machines    what a process knows of them
proof       that both ends of a connection are of one router
plane       the control plane, which gives leases
membership  a process's leases, and where everything else is
forwarding  requests that go from machine to machine
owners      which machine has what
duty        what a process does on one of them
"""
