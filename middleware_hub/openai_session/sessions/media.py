"""The media policy: images, audio and the like in a request are refused, or replaced by a fixed text.

A session records text only. By default media are refused in the first turn of a session and replaced in later turns:
an agent that has begun must be able to go on.
"""

from __future__ import annotations

from base64 import b64decode
from collections import Counter
from collections.abc import Mapping
from typing import Any

from middleware_hub.openai_session.episodes.contract import REFUSE, REPLACE
from miles_router.errors import BadRequest

#: The policies of a run; a session's contract may set the last two.
REFUSE_FIRST = "refuse_first"
POLICIES = (REFUSE_FIRST, REFUSE, REPLACE)
#: The kind of medium for each part type of any agent API.
KINDS: Mapping[str, str] = {
    **{
        f"{before}{kind}{behind}": kind
        for kind in ("image", "audio", "video", "file")
        for before, behind in (("", ""), ("input_", ""), ("", "_url"))
    },
    **{"document": "document", "container_upload": "file", "computer_screenshot": "image"},
}
#: The kind of a part with any other type.
OTHER = "content"
HINT = "to send a fixed text instead, set media to 'replace', in openai_session_middleware or the session's contract"


class Media:
    """The media policy of one request, and the count of replaced parts.

    Attributes:
        refuses: True to refuse media, False to replace them.
        replaced: the number of replaced parts of each kind.
    """

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses
        self.replaced: Counter[str] = Counter()

    def replace(self, kind: str, where: str) -> str:
        """Count a part of this type and return the text that replaces it.

        Raises:
            BadRequest: the policy refuses media.
        """
        if self.refuses:
            raise BadRequest(f"{where}: {kind[:64]!r} is not text, and a session records text only; {HINT}")
        name = KINDS.get(kind, OTHER)
        self.replaced[name] += 1
        return f"[{name} omitted]"

    def replace_unknown(self, kind: object, where: str) -> str:
        """Count a part of an unknown type and return the text that replaces it.

        Raises:
            BadRequest: the policy refuses media.
        """
        if self.refuses:
            raise BadRequest(f"{where}: a session cannot record blocks of the type {str(kind)[:64]!r}; {HINT}")
        return self.replace(str(kind), where)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts for the record of the turn."""
        return {"media_replaced": dict(self.replaced)} if self.replaced else {}


def text_of_data(url: object) -> str | None:
    """Return the text of a base64 `data:text/` URL; None for anything else."""
    if not isinstance(url, str) or not url.startswith("data:text/"):
        return None
    head, _, data = url.partition(",")
    return text_of_base64(data) if head.endswith(";base64") else None


def text_of_base64(data: object) -> str | None:
    """Return the UTF-8 text that `data` encodes in base64; None if it is not base64 of UTF-8."""
    try:
        return b64decode(data, validate=True).decode() if isinstance(data, str) else None
    except ValueError:
        return None
