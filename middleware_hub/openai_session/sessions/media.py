"""Images and the like in a request: refused, or replaced by a fixed text, since a session traces text alone.

An agent that has begun must be able to go on: by default what it attaches is refused in its first turn and replaced in
later ones.
"""

from __future__ import annotations

from base64 import b64decode
from collections import Counter
from collections.abc import Mapping
from typing import Any

from middleware_hub.openai_session.episodes.contract import REFUSE, REPLACE
from middleware_hub.openai_session.errors import MediaNotTraced
from miles_router.errors import BadRequest

#: The policies of a run; a contract has the last two.
REFUSE_FIRST = "refuse_first"
POLICIES = (REFUSE_FIRST, REFUSE, REPLACE)
#: What stands for more than its words, by the type of its part in any API.
KINDS: Mapping[str, str] = {
    **{
        f"{before}{kind}{behind}": kind
        for kind in ("image", "audio", "video", "file")
        for before, behind in (("", ""), ("input_", ""), ("", "_url"))
    },
    **{"document": "document", "container_upload": "file", "computer_screenshot": "image"},
}
#: What parts of any other type are called.
OTHER = "content"
#: What to do about a refusal.
HINT = "for a text in its place, set the option media of the sessions, or media in the session's contract, to 'replace'"


class Media:
    """What is not text in the requests of one history.

    Attributes:
        refuses: whether such a part is refused.
        replaced: how many of each kind were replaced.
    """

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses
        self.replaced: Counter[str] = Counter()

    def text(self, kind: str, where: str) -> str:
        """Return the text in place of a part of this type.

        Raises:
            MediaNotTraced: parts are refused.
        """
        if self.refuses:
            raise MediaNotTraced(f"{where}: {kind[:64]!r} is no text, and a session traces text alone; {HINT}")
        name = KINDS.get(kind, OTHER)
        self.replaced[name] += 1
        return f"[{name} omitted]"

    def other(self, kind: object, where: str) -> str:
        """Return the text in place of a part whose type no session traces.

        Raises:
            BadRequest: parts are refused.
        """
        if self.refuses:
            raise BadRequest(f"{where}: blocks of the type {str(kind)[:64]!r} cannot be traced here; {HINT}")
        return self.text(str(kind), where)

    @property
    def facts(self) -> dict[str, Any]:
        """What the record of a turn says of it."""
        return {"media_replaced": dict(self.replaced)} if self.replaced else {}


def text_of_data(url: object) -> str | None:
    """Return the text in a `data:` URL of a text; None for anything else."""
    if not isinstance(url, str) or not url.startswith("data:text/"):
        return None
    head, _, data = url.partition(",")
    return text_of_base64(data) if head.endswith(";base64") else None


def text_of_base64(data: object) -> str | None:
    """Return the UTF-8 text that is encoded so; None for anything else."""
    try:
        return b64decode(data, validate=True).decode() if isinstance(data, str) else None
    except ValueError:
        return None
