"""One router on several processes and machines: shards, which serve requests, and one leader, which decides.

- `protocol`: the messages and the leases, without I/O. `channel` and `proof` carry and protect the messages.
- `membership`: a shard's connection to the leader. `coordinator`: the leader's connections to the shards.
- `leadership`: whether a leader is the last one.
- `role`: the part of a router that a process runs. `leader` and `shard` override it.
- `merged_view`, `all_requests`: all shards, as the leader shows and asks them.
- `state`, `pools`: the decisions about one pool, written by the leader and applied by shards.
- `peer_loads`: requests in flight at other processes, and placement with them.
- `owners`, `forwarding`, `held_names`: which shard owns what, and requests that another shard answers.
- `topology`: the shards. `process_table`: their processes, on one machine.
"""
