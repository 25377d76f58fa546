"""One router on several processes and machines: ordinary routers (shards) in numbered seats, and a leader that decides.

protocol  what a leader and its shards say to each other, and who may act
"""
