"""One router on several processes and machines: shards that take requests, and one leader that decides.

protocol      what they say to each other, and who may act: pure
channel, proof, membership, seats   how it is said; a shard's end of it, and the leader's
register      whether a leader is the last one
leader, shard what each does of a router (duty); as_one, all_requests: all shards, seen and asked by the leader
state, pools  what is decided of one pool, written and followed
peer_loads    requests in flight elsewhere, and choosing by that
owners, forwarding, held_names   which shard has what, and requests that another one answers
places, senders   the seats, and on one machine the processes in them
"""
