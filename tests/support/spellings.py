"""One path in many spellings: what an attacker tries at a proxy that knows the path by its usual one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.support.tiers import nightly

#: Behind the path: control characters, slashes, parameters, an empty query, what is no escape.
BEHIND = r"""%0a %0A %0d %0d%0a %00 %09 %0b %1f %7f %20 %c2%85 %c2%a0 %e2%80%a8 %e2%80%8b / // %2f %2F %5c \ . %2e /.
    /%2e /x/.. /x/%2e%2e ; ;a=1 ;/ ? %3f %3fx=1 %23 # ?x=1 ?/../x & % %zz %ff %c0%af%20 %25 %250a"""
#: In front of it, where a slash stands.
BEFORE = r"""// /// %2f /%2f \ /\ %5c /./ /%2e/ /.%2f /x/../ /x/%2e%2e/ /x/.%2e/ /x%2f..%2f /..;/ /;/ /%c0%af
    /generate/../ /v1/models/..%2f..%2f /v1/models/%2e%2e%2f%2e%2e%2f /health/../ /sessions/../ /workers/..%2f
    /metrics;/ http://router.test/ HTTP://router.test:80/ http://router.test// http://x@router.test/"""


def spellings(path: str) -> Iterator[str]:
    """Request targets that some reader could take for `path`; itself is the first."""
    yield path
    name = path[1:]
    yield from (path + each for each in BEHIND.split())
    yield from (each + name for each in BEFORE.split())
    for escape in (str.lower, str.upper):
        yield "/" + "".join(escape(f"%{ord(char):02x}") for char in name)
        yield "/" + escape(f"%{ord(name[0]):02x}") + name[1:]
        yield path[:-1] + escape(f"%{ord(name[-1]):02x}")
    yield f"/%25{ord(name[0]):02x}{name[1:]}"
    yield f"/%u00{ord(name[0]):02x}{name[1:]}"
    yield path.upper()
    yield path.title()
    yield path.replace("_", "%5f") + "%0a"
    yield path.replace("_", "%5F")


#: In a run of `make test`, which of them a path is tried in: one in so many, others for the next path.
THINNED = 4


def some_spellings(path: str, paths: Sequence[str]) -> list[str]:
    """Those in which one of several paths is tried; in the nightly tier all of them."""
    every = list(dict.fromkeys(spellings(path)))
    return every if nightly() else every[paths.index(path) % THINNED :: THINNED]
