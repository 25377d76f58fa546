"""One router on several machines of a Ray cluster. Needs the extra `[ray]`.

    router = miles_router.ray.start(config, nodes=4)      # in a program that has called ray.init
    router.urls                                           # the shards; a client may use any of them
    router.stop()

Ray places one actor for each shard and one for the leader, and restarts actors that end. Each actor runs its part of
the router in a separate process, so that requests never wait for an actor call.
"""

from miles_router.ray.router import RayRouter, start

__all__ = ["RayRouter", "start"]
