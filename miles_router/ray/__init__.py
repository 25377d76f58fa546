"""One router on the machines of a Ray cluster. Needs the extra `[ray]`.

    router = miles_router.ray.start(config, nodes=4)      # in a program that has called ray.init
    router.urls                                           # of the machines, any of which may be asked
    router.stop()

Ray places one actor on each machine, starts again what ends, and tells where the control plane is: all of that beside
requests, none of which waits for a call of an actor.
"""

from miles_router.ray.starting import RayRouter, start

__all__ = ["RayRouter", "start"]
