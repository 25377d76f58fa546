"""The command `miles-router ray`."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

from miles_router import log
from miles_router.errors import ConfigError
from miles_router.ray.starting import start
from miles_router.settings.config import RouterConfig
from miles_router.version import __version__

import ray  # isort: skip  # behind `starting`, which says what to install

NAMESPACE = "miles-router"
#: Seconds after which a signal is seen at the latest.
LOOK = 0.5


def run(config: RouterConfig, address: str, nodes: int) -> None:
    """Run a router on the machines of a cluster until SIGTERM or SIGINT.

    Raises:
        ConfigError: a setting that cannot be used, no cluster at `address`, or not so many machines.
    """
    log.configure(config.log_level, config.log_format)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        raise ConfigError(f"ray: no cluster at {address}: {error}") from None
    signal.signal(signal.SIGTERM, _stop)
    try:
        try:
            router = start(config, nodes=nodes)
        except (TimeoutError, ValueError) as error:
            raise ConfigError(f"ray: {error}") from None
        log.show("\n".join([f"miles-router {__version__}", *(f"  listening    {url}" for url in router.urls)]))
        try:
            while True:  # Ray has threads, which may be given the signal: a wait of this one would not end by it
                time.sleep(LOOK)
        except (KeyboardInterrupt, SystemExit):
            router.stop()
    finally:
        ray.shutdown()
        log.flush()


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
