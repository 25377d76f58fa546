"""Engines: what one kind of engine is asked, and how its answers are read. Pure: `forwarding/` and `control/` send.

Each kind has a folder of its own beside this file, and a line in `known.py`. Everything else asks the engine that a
worker is, and never for its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from miles_router.engines.actions import Action, Order, Pause
from miles_router.engines.control import Arguments, ControlRequest
from miles_router.engines.events import Event
from miles_router.engines.questions import EngineQuestion
from miles_router.engines.refusals import Overflow

if TYPE_CHECKING:
    from miles_router.engines.facts import Facts
    from miles_router.engines.pairs.request import PairedRequest

#: Parses a request's body within its bounds.
Parse = Callable[[bytes], Any]
#: The names of one path, the newest first: an engine that answers 404 is asked by the next one.
Names = Sequence[str]
#: What an engine answered, by the newest name of the path: b"" where it has no such document, `WITHHELD` where it wants
#: a key, None where it did not answer.
Documents = Mapping[str, bytes | None]
WITHHELD = b"null"
Headers = list[tuple[bytes, bytes]]
UNAVAILABLE = 503


class CannotServe(ValueError):
    """A request that an engine would not answer as it is meant. The message says what it lacks."""


class RankWish(NamedTuple):
    """What a client's request says of ranks. `rank`: None for nothing, or nothing that can be known here. `heeded`: it
    stands where the engine reads it, so that nothing needs to be added."""

    rank: int | None
    heeded: bool


NO_WISH = RankWish(None, False)


class RankReader(Protocol):
    """Reads an answer as it arrives."""

    def feed(self, data: bytes) -> int | None:
        """Return the rank that answers, where the next piece shows it."""
        ...


class Translation(Protocol):
    """One request as an engine has to be asked, and its answers as SGLang would have given them."""

    #: Where the engine is sent it, with the query; None: as it came.
    target: bytes | None
    #: What the engine is sent.
    body: bytes
    #: The engine's name of each generation that the client has named, by the client's.
    rids: Mapping[str, str]
    #: Whether the engine keeps prefix caches apart by the key that is written into it.
    heeds_cache_key: bool

    def whole(self, answer: bytes, version: str | None) -> bytes:
        """Return a whole answer. `version` is that of the weights, where the router alone knows it.

        Raises:
            UnreadableAnswer: it lacks something, or contradicts itself. So with `event`.
        """
        ...

    def event(self, event: Event, version: str | None) -> bytes:
        """Return an event of a stream."""
        ...


class Parts:
    """One request as several to the same worker. Each answers with a list, and these follow on each other."""

    heeds_cache_key = True

    def __init__(self, parts: Sequence[Translation]) -> None:
        self.parts = parts
        self.rids: Mapping[str, str] = {own: name for part in parts for own, name in part.rids.items()}

    @staticmethod
    def joined(answers: Sequence[bytes]) -> bytes:
        """Return the lists of all parts as one."""
        return b"[%b]" % b",".join(answer[1:-1] for answer in answers)


class Engine(ABC):
    """One kind of engine."""

    kind: ClassVar[str]
    #: Asked at every check: silent only where the engine is gone.
    alive: ClassVar[Names]
    #: Answered by what generates, without generating: proves that it moves, and names the weights that sample.
    scheduler: ClassVar[Names]
    #: Generates a token: proves that the engine works.
    deep: ClassVar[Order]
    #: The same for an engine that may stand still: the engine's environment changes nothing about it.
    token: ClassVar[Names]
    #: Says, as `is_unready` reads it, that the engine is paused, or that `deep` failed and none succeeded since. None:
    #: nothing says so.
    ready: ClassVar[str | None] = None
    #: 503 after a failed `deep` until one succeeds; a pause changes nothing.
    well: ClassVar[str | None] = None
    #: What the engine says about itself.
    documents: ClassVar[Sequence[Names]]
    #: Of these, those whose first answer takes longer than a check may: seconds, by the newest name.
    slow_documents: ClassVar[Mapping[str, float]] = MappingProxyType({})
    #: The path of its numbers, as Prometheus reads them.
    metrics: ClassVar[str]
    #: Lists its models, and adapters among them.
    models: ClassVar[Names]
    #: Paths whose requests generate; all others pass a closed gate.
    generates: ClassVar[frozenset[str]]
    #: Paths whose requests the engine itself works on, those that generate among them.
    computes: ClassVar[frozenset[str]]
    #: What an agent may post beside what generates. Nothing here changes an engine.
    aside: ClassVar[frozenset[str]]
    #: Those of them that make tokens of text, and text of tokens.
    tokenizers: ClassVar[frozenset[str]]
    #: What the clients' key opens where administration has a key of its own; one that ends with `/` stands for all
    #: beneath it. Everything else needs the key of administration, so that a new engine opens nothing.
    client_paths: ClassVar[frozenset[str]]
    #: What the engine puts in front of 32 hexadecimal digits where a client gives a generation no name.
    made_names: ClassVar[Sequence[str]] = ("",)
    #: The field of that name, by path, where it is another than that of `/generate`.
    name_fields: ClassVar[Mapping[str, str]] = MappingProxyType({})
    #: Makes tokens of a text, no special ones added.
    tokenize: ClassVar[Names] = ()
    #: Fields by which a client itself chooses where the engine computes.
    places: ClassVar[frozenset[str]] = frozenset()
    #: Paths where an adapter has a field and the model says nothing, and all where it has a field.
    adapter_only_by_field: ClassVar[frozenset[str]] = frozenset()
    adapter_by_field: ClassVar[frozenset[str]] = frozenset()
    #: Paths where an adapter is a model, by its own name.
    adapter_by_model: ClassVar[frozenset[str]] = frozenset()
    #: Headers that it would read otherwise than they are meant.
    unwanted_headers: ClassVar[frozenset[bytes]] = frozenset()
    #: Its control requests.
    control: ClassVar[Sequence[ControlRequest]]
    #: Whether it says which weights it has. Where not, they are what the router was told.
    tells_version: ClassVar[bool] = True
    #: The modes of a pause that it is told in place of others.
    pauses: ClassVar[Mapping[str, str]] = MappingProxyType({})
    #: Whether it can release its memory, and have it again.
    sleeps: ClassVar[bool] = True
    #: Whether a generation that is aborted by its name is answered with all that it has sampled.
    returns_aborted: ClassVar[bool] = True
    #: Sampling parameters, and fields of `/generate`, that depend on what was output before: a generation with one of
    #: them is not carried on behind a cut.
    stateful: ClassVar[frozenset[str]] = frozenset()
    #: Whether a seed that is sent again with what it has sampled samples the same noise again: what is carried on goes
    #: without it.
    repeats_noise: ClassVar[bool] = False
    #: Whether `/generate` samples behind ids alone: of a text they are asked for first (`ask_prompt_tokens`).
    ids_only: ClassVar[bool] = False
    #: Whether its chat samples behind ids that it is given, and tells those that it has sampled. Where not, sessions
    #: render prompts and read answers themselves, and ask for raw chat by ids, which `translate` makes a request of
    #: `/generate` (`openai/by_ids.py`).
    chats_by_ids: ClassVar[bool] = False
    #: Whether `translate` may change requests and answers; otherwise they pass byte for byte.
    translates: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def recognized(cls, documents: Documents) -> Engine | None:
        """Return the engine that these documents are from, or None where they are another kind's."""

    @abstractmethod
    def facts(self, documents: Documents) -> Facts:
        """Read what the documents say; what cannot be read says nothing."""

    @abstractmethod
    def has_said_all(self, documents: Documents) -> bool:
        """Return whether the documents by which an engine is recognized were answered."""

    @abstractmethod
    def sampling_version(self, said: bytes) -> str | None:
        """Read which weights sample now in an answer of `scheduler`; None where it names none, or several."""

    def is_unready(self, status: int, said: bytes) -> bool:
        """Return whether an answer of `ready` says that it is not."""
        return status == UNAVAILABLE

    def with_adapter(self, path: str, body: bytes, adapter: str, parse: Parse) -> bytes:
        """Return a request whose model is `base:adapter` so that its route applies the adapter.

        Raises:
            CannotServe: the route never does.
            What `parse` raises.
        """
        raise CannotServe(f"{path} applies no adapters")

    def adapters(self, listed: bytes) -> frozenset[str]:
        """Return the adapters in an answer of `models`; none in what cannot be read."""
        return frozenset()

    def ask_prompt_tokens(self, text: str) -> EngineQuestion[list[int]] | None:
        """Return how it is asked for the tokens of a prompt of `/generate`; None where it cannot be. So with the next
        four."""
        return None

    def ask_chat_tokens(self, chat: Mapping[str, Any]) -> EngineQuestion[list[int]] | None:
        """Return how it is asked for the prompt that its template makes of a chat request."""
        return None

    def ask_texts(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> EngineQuestion[list[str]] | None:
        """Return how it is asked for the text of each of these ids."""
        return None

    def ask_reasoning(self, text: str, parser: str) -> EngineQuestion[tuple[str, str]] | None:
        """Return how it is asked for the reasoning that a parser finds in a whole answer, and the rest of that."""
        return None

    def ask_calls(self, text: str, tools: Sequence[Any], parser: str) -> EngineQuestion[tuple[str, list[Any]]] | None:
        """Return how it is asked for a whole answer without the tool calls that a parser finds, and for those: `name`
        and `parameters` of each."""
        return None

    def tokenize_body(self, text: str) -> bytes:
        """Return what `tokenize` is asked for a text."""
        raise CannotServe("it makes no tokens of texts")

    def tokens(self, answer: bytes) -> list[int] | None:
        """Return the ids in an answer of `tokenize`; None where it has none."""
        return None

    @staticmethod
    def overflow(message: str) -> Overflow | None:
        """Return what an error of the engine's says of the context window; None where it is about something else."""
        return None

    @abstractmethod
    def takes_cache_key(self, facts: Facts, path: str) -> bool:
        """Return whether prefix caches of requests to this path are kept apart by a key, as far as facts say so."""

    @abstractmethod
    def with_cache_key(self, body: bytes, key: str) -> bytes:
        """Write this key into a request, in front of the client's own. A request that cannot be read stays as it is:
        the engine says what is wrong with it."""

    @abstractmethod
    def order(self, action: Action) -> Order:
        """Return the request by which the engine is told something. Each can pause, go on, abort and flush.

        Raises:
            CannotServe: it cannot do this.
        """

    def refused(self, answer: bytes) -> bool:
        """Return whether an answer to a control request says that nothing was done, whatever its status."""
        return False

    @classmethod
    def own_request(cls, path: str) -> ControlRequest | None:
        """Return how a control request is read whose path is the user's own; None where the path says nothing."""
        return None

    @classmethod
    def read(cls, path: str, arguments: Arguments) -> Action | None:
        """Return the action that the engine reads in a control request; None where it has no such request.

        Raises:
            BadArguments: it could make no sense of it.
        """
        request = next((each for each in cls.control if each.path == path), None)
        return None if request is None else request.read(arguments)

    def pause_told(self, pause: Pause) -> Pause:
        """Return the pause that the engine is told in place of another whose mode it lacks."""
        return Pause(self.pauses.get(pause.mode, pause.mode))

    @staticmethod
    def rank_wish(path: str, headers: Headers, body: bytes, parse: Parse) -> RankWish:
        """Return which rank a client wants that speaks to this engine. Raises what `parse` raises."""
        return NO_WISH

    def ranks(self, facts: Facts) -> int:
        """Return how many data-parallel ranks requests can be pinned to."""
        return 1

    def pinned(
        self, path: str, headers: Headers, body: bytes, rank: int, *, encoded: bool
    ) -> tuple[Headers, bytes] | None:
        """Return a request as it is sent to one rank; None where the engine chooses. `encoded`: its body is compressed,
        and cannot be written into."""
        return None

    def rank_reader(self, path: str, *, streamed: bool) -> RankReader | None:
        """Return what reads from an answer which rank gave it; None where answers do not tell."""
        return None

    def paired(self, path: str, body: bytes, parse: Parse) -> PairedRequest:
        """Return what both halves of a pair of these engines are asked for a request.

        Raises:
            CannotServe: a pair would answer something else than is meant, or not at all.
            What `parse` raises.
        """
        raise CannotServe("the engine has no halves")

    def with_room(self, body: bytes, host: str, port: int, room: int) -> bytes:
        """Return a request with the place where the halves meet."""
        raise CannotServe("the engine has no halves")

    def translate(self, path: str, body: bytes, parse: Parse) -> Translation | Parts | None:
        """Return how a request to this path is asked; None where it goes as it came.

        Raises:
            CannotServe: the engine would answer something else than is meant.
            UnknownShape: that cannot be seen.
        """
        return None
