"""Policies of a run and a session for requests with media or unknown fields, which a session does not trace."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from middleware_hub.openai_session.episodes.contract import REFUSE
from middleware_hub.openai_session.sessions.media import POLICIES, REFUSE_FIRST
from middleware_hub.openai_session.sessions.session import Session
from miles_router.errors import ConfigError

RECORD = "record"
#: The policies for unknown fields.
UNKNOWN_POLICIES = (REFUSE, RECORD)
UNKNOWN_HINT = "set the option unknown_fields of the sessions to 'record' to have such fields ignored and recorded"
#: The most unknown fields that a turn's record names, and the most characters of each name.
MOST_NAMES, LONGEST_NAME = 32, 64


@dataclass(frozen=True)
class RequestPolicy:
    """Flags for one request: whether media, and whether unknown fields are refused."""

    media: bool = True
    unknown: bool = True


@dataclass(frozen=True)
class RunPolicy:
    """The run's policies for all requests, by their option names."""

    media: str = REFUSE_FIRST
    unknown: str = REFUSE

    @classmethod
    def checked(cls, media: str, unknown_fields: str) -> RunPolicy:
        """Return the policies of these options.

        Raises:
            ConfigError: an option is not the name of a policy.
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
        """Return the policy for the session's next request. The session's contract takes precedence over the run."""
        media = session.episode.contract.media or self.media
        refuses = media == REFUSE or (media == REFUSE_FIRST and not session.turns)
        return RequestPolicy(refuses, self.unknown == REFUSE)


class UnknownFields:
    """The fields of one request that its API does not have.

    Attributes:
        names: in the order in which they were found, at most `MOST_NAMES`.
    """

    def __init__(self, *, refuses: bool) -> None:
        self._refuses = refuses
        self.names: list[str] = []

    def refused(self, holder: Mapping[str, Any], known: Set[str], before: str = "") -> str | None:
        """Return the first unknown field if the policy refuses such fields, else record all and return None. Fields
        that are null or false count as not given.

        Args:
            holder: an object of the request.
            before: the path of that object, which is put in front of the names.
        """
        found = sorted(each for each in holder.keys() - known if holder[each] is not None and holder[each] is not False)
        if found and self._refuses:
            return before + found[0][:LONGEST_NAME]
        self.names += [before + each[:LONGEST_NAME] for each in found[: MOST_NAMES - len(self.names)]]
        return None

    @property
    def facts(self) -> dict[str, Any]:
        """The unknown fields, for the turn's record."""
        return {"unknown_fields": self.names} if self.names else {}
