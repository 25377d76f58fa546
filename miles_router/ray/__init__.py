"""One router on several machines of a Ray cluster. Needs the extra `[ray]`.

    router = miles_router.ray.start(config, nodes=4)      # in a program that has called ray.init
    router.urls                                           # of its shards, any of which may be asked
    router.stop()

Ray places an actor for each seat and one for the leader, and starts again what ends. Each runs its part in a process
beside itself, so that no request waits for a call of an actor.
"""

from miles_router.ray.router import RayRouter, start

__all__ = ["RayRouter", "start"]
