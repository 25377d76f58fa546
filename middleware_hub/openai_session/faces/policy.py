"""What a run and a session decide about requests that hold more than a session traces."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from middleware_hub.openai_session.episodes.contract import REFUSE
from middleware_hub.openai_session.sessions.media import POLICIES, REFUSE_FIRST
from middleware_hub.openai_session.sessions.session import Session
from miles_router.errors import ConfigError

RECORD = "record"
#: Of unknown fields.
UNKNOWN_POLICIES = (REFUSE, RECORD)
UNKNOWN_HINT = "set the option unknown_fields of the sessions to 'record' to have such fields ignored and recorded"
#: Names that the record of a turn has at most, and characters of each.
MOST_NAMES, LONGEST_NAME = 32, 64


@dataclass(frozen=True)
class RequestPolicy:
    """What is refused of one request."""

    media: bool = True
    unknown: bool = True


@dataclass(frozen=True)
class RunPolicy:
    """The same for all requests of a run: policies by their names."""

    media: str = REFUSE_FIRST
    unknown: str = REFUSE

    @classmethod
    def checked(cls, media: str, unknown_fields: str) -> RunPolicy:
        """Return those of the options.

        Raises:
            ConfigError: one of them is no policy.
        """
        for option, value, known in (
            ("media", media, POLICIES),
            ("unknown_fields", unknown_fields, UNKNOWN_POLICIES),
        ):
            if value not in known:
                problem = f"must be one of {', '.join(known)}, not {value!r}"
                raise ConfigError(f"openai_session_middleware.{option}: {problem}")
        return cls(media, unknown_fields)

    def of(self, session: Session) -> RequestPolicy:
        """Return what is refused of the next request of a session; its contract counts more."""
        media = session.episode.contract.media or self.media
        refuses = media == REFUSE or (media == REFUSE_FIRST and not session.turns)
        return RequestPolicy(refuses, self.unknown == REFUSE)


class UnknownFields:
    """The fields of one request that this API does not have.

    Attributes:
        names: in the order in which they were found, at most `MOST_NAMES`.
    """

    def __init__(self, *, refuses: bool) -> None:
        self._refuses = refuses
        self.names: list[str] = []

    def refused(self, holder: Mapping[str, Any], known: Set[str], before: str = "") -> str | None:
        """Return the first unknown field that has a value, if such are refused, else note all of them. Null and false
        mean that a field is not given.

        Args:
            before: what stands in front of the names of this object.
        """
        found = sorted(each for each in holder.keys() - known if holder[each] is not None and holder[each] is not False)
        if found and self._refuses:
            return before + found[0][:LONGEST_NAME]
        self.names += [before + each[:LONGEST_NAME] for each in found[: MOST_NAMES - len(self.names)]]
        return None

    @property
    def facts(self) -> dict[str, Any]:
        """What the record of a turn says of them."""
        return {"unknown_fields": self.names} if self.names else {}
