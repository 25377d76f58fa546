"""The sub-API for state, for middlewares that keep sessions, texts or rows.

router.store     a journal of blobs by owner that outlives the process; None without `--state-dir`
router.owners    the owners of names; in a router of several processes, `require` forwards a request to the owner
"""

from miles_router.asgi.wire import header_texts, raw_headers
from miles_router.middlewares.contract import BODY_SAYS, HasOwners, Restores
from miles_router.middlewares.owners import Elsewhere, HeldNames, Owners
from miles_router.slots import SLOTS
from miles_router.state.blobs import Blobs, Changes, header_of, with_header
from miles_router.state.store import StateStore

__all__ = [
    "BODY_SAYS",
    "SLOTS",
    "Blobs",
    "Changes",
    "Elsewhere",
    "HasOwners",
    "HeldNames",
    "Owners",
    "Restores",
    "StateStore",
    "header_of",
    "header_texts",
    "raw_headers",
    "with_header",
]
