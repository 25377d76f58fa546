"""The `Engine` interface: which requests each kind of engine takes, and how its answers are parsed. No I/O.

`forwarding/` and `control/` send the requests. Each kind of engine has a subpackage beside this file and an entry in
`known.py`. All other code calls the `Engine` object of a worker and never compares engine names.
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

#: A parser of request bodies that enforces limits on their size and depth.
Parse = Callable[[bytes], Any]
#: The names of one path, newest first. If the engine answers 404, the router tries the next name.
Names = Sequence[str]
#: The answers of an engine, keyed by the newest name of the path. b"": it has no such document. `WITHHELD`: it requires
#: a key. None: it did not answer.
Documents = Mapping[str, bytes | None]
WITHHELD = b"null"
Headers = list[tuple[bytes, bytes]]
UNAVAILABLE = 503
#: A reader of one answer's rank: gets each piece as it arrives, and returns the rank once a piece completes it.
ReadRank = Callable[[bytes], int | None]


class CannotServe(ValueError):
    """An error about a request that this engine cannot answer as the client intends. The message names the missing
    feature or flag."""


class RankWish(NamedTuple):
    """The data-parallel rank that a client's request asks for.

    Attributes:
        rank: None if the request names none, or none that can be read.
        heeded: the rank stands where the engine reads it, so the router adds nothing.
    """

    rank: int | None
    heeded: bool


NO_WISH = RankWish(None, False)


class Translation(Protocol):
    """One request in the engine's own form, and the conversion of its answers to the form of SGLang."""

    #: The target (path and query) to send; None: the client's target.
    target: bytes | None
    #: The body to send.
    body: bytes
    #: The engine's `rid` of each generation that the client has named, by the client's `rid`.
    rids: Mapping[str, str]
    #: Whether the engine separates prefix caches by the key in the request.
    heeds_cache_key: bool

    def whole(self, answer: bytes, version: str | None) -> bytes:
        """Convert a complete answer. `version` is the weight version, if only the router knows it.

        Raises:
            UnreadableAnswer: the answer misses a field or contradicts itself.
        """
        ...

    def event(self, event: Event, version: str | None) -> bytes:
        """Convert one event of a stream. Raises as `whole`."""
        ...


class Parts:
    """One request split into several to the same worker. Each part answers with a JSON list, and the lists are
    concatenated."""

    heeds_cache_key = True

    def __init__(self, parts: Sequence[Translation]) -> None:
        self.parts = parts
        self.rids: Mapping[str, str] = {own: name for part in parts for own, name in part.rids.items()}

    @staticmethod
    def joined(answers: Sequence[bytes]) -> bytes:
        """Concatenate the JSON lists of all parts."""
        return b"[%b]" % b",".join(answer[1:-1] for answer in answers)


class Engine(ABC):
    """One kind of engine."""

    kind: ClassVar[str]
    #: The path of every health check. It is silent only if the engine is gone.
    alive: ClassVar[Names]
    #: Answered by the scheduler without generating: proves that the scheduler runs, and names the weights that sample.
    scheduler: ClassVar[Names]
    #: Generates a token, which proves that the engine works.
    deep: ClassVar[Order]
    #: Like `deep`, but independent of the engine's environment variables. Used if the engine may be stalled.
    token: ClassVar[Names]
    #: Reports (see `is_unready`) that the engine is paused, or that `deep` failed and has not succeeded since. None: it
    #: has no such path.
    ready: ClassVar[str | None] = None
    #: Answers 503 after a failed `deep` until one succeeds. A pause does not affect it.
    well: ClassVar[str | None] = None
    #: The documents that describe the engine.
    documents: ClassVar[Sequence[Names]]
    #: Timeouts in seconds for documents whose first answer may take longer than a check, by their newest name.
    slow_documents: ClassVar[Mapping[str, float]] = MappingProxyType({})
    #: The path of its Prometheus metrics.
    metrics: ClassVar[str]
    #: Lists its models and loaded adapters.
    models: ClassVar[Names]
    #: Paths whose requests generate. Only these wait at a closed gate.
    generates: ClassVar[frozenset[str]]
    #: Paths whose requests need the engine to compute, including those that generate.
    computes: ClassVar[frozenset[str]]
    #: Paths that an agent may post to besides the paths that generate. None of them changes the engine.
    aside: ClassVar[frozenset[str]]
    #: The paths in `aside` that tokenize and detokenize.
    tokenizers: ClassVar[frozenset[str]]
    #: Paths that the clients' API key opens if there is a separate admin key. A path that ends with `/` covers
    #: everything below it. All other paths need the admin key, so a new engine exposes nothing by default.
    client_paths: ClassVar[frozenset[str]]
    #: Prefixes of the request ids that the engine makes (prefix and 32 hexadecimal digits) if a client gives none.
    made_names: ClassVar[Sequence[str]] = ("",)
    #: The field of the request id, by path, where it is not `rid`.
    name_fields: ClassVar[Mapping[str, str]] = MappingProxyType({})
    #: Tokenizes a text without adding special tokens.
    tokenize: ClassVar[Names] = ()
    #: Fields by which a client chooses the rank or the room of a pair itself.
    places: ClassVar[frozenset[str]] = frozenset()
    #: Paths where only a field selects the adapter and `model` is ignored, and all paths with such a field.
    adapter_only_by_field: ClassVar[frozenset[str]] = frozenset()
    adapter_by_field: ClassVar[frozenset[str]] = frozenset()
    #: Paths where `model` is the bare name of the adapter.
    adapter_by_model: ClassVar[frozenset[str]] = frozenset()
    #: Client headers that the engine misinterprets, so they are not forwarded.
    unwanted_headers: ClassVar[frozenset[bytes]] = frozenset()
    control: ClassVar[Sequence[ControlRequest]]
    #: Whether it reports its weight version. If not, the router uses the version of the last update.
    tells_version: ClassVar[bool] = True
    #: Pause modes that are replaced by others for this engine.
    pauses: ClassVar[Mapping[str, str]] = MappingProxyType({})
    #: Whether it can release its GPU memory and allocate it again.
    sleeps: ClassVar[bool] = True
    #: Whether the answer to an aborted generation contains all sampled tokens.
    returns_aborted: ClassVar[bool] = True
    #: Sampling parameters and fields of `/generate` that depend on the earlier output. A generation with one of them
    #: cannot be resumed.
    stateful: ClassVar[frozenset[str]] = frozenset()
    #: Whether a resumed request with the same seed repeats the noise of its beginning. If so, the router drops the
    #: seed.
    repeats_noise: ClassVar[bool] = False
    #: Whether `/generate` accepts only token ids. Texts are tokenized first (`ask_prompt_tokens`).
    ids_only: ClassVar[bool] = False
    #: The most prompts in one `/generate` request; None if there is no limit.
    max_prompts: ClassVar[int | None] = None
    #: Whether its chat API accepts prompt ids and returns the sampled ids. If not, sessions render prompts and parse
    #: answers themselves; `translate` converts their chat requests by ids to `/generate` (`openai/by_ids.py`).
    chats_by_ids: ClassVar[bool] = False
    #: Whether `translate` may change requests and answers. Otherwise they pass byte for byte.
    translates: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def recognized(cls, documents: Documents) -> Engine | None:
        """Return the engine that sent these documents, or None if they come from another kind."""

    @abstractmethod
    def facts(self, documents: Documents) -> Facts:
        """Parse the documents. Unreadable parts leave their facts at None."""

    @abstractmethod
    def has_said_all(self, documents: Documents) -> bool:
        """Return whether the documents that identify an engine were answered."""

    def weight_version(self, body: bytes) -> str | None:
        """Return the weight version in an answer of `alive`; None if it names none."""
        return self.facts({self.alive[0]: body}).weight_version

    @abstractmethod
    def sampling_version(self, body: bytes) -> str | None:
        """Return the weight version that samples now, from an answer of `scheduler`; None if it names none or
        several."""

    def is_unready(self, status: int, body: bytes) -> bool:
        """Return whether an answer of `ready` reports that the engine is not ready."""
        return status == UNAVAILABLE

    def with_adapter(self, path: str, body: bytes, adapter: str, parse: Parse) -> bytes:
        """Return the request, whose model is `base:adapter`, changed so that the route applies the adapter.

        Raises:
            CannotServe: the route never applies adapters.
            Exception: any error of `parse`.
        """
        raise CannotServe(f"{path} does not apply LoRA adapters")

    def adapters(self, listed: bytes) -> frozenset[str]:
        """Return the adapters in an answer of `models`; an empty set if it cannot be read."""
        return frozenset()

    def ask_prompt_tokens(self, text: str) -> EngineQuestion[list[int]] | None:
        """Return the request for the token ids of a `/generate` prompt; None if the engine has no such request."""
        return None

    def ask_chat_tokens(self, chat: Mapping[str, Any]) -> EngineQuestion[list[int]] | None:
        """Return the request for the prompt ids that the chat template renders; None if the engine has none."""
        return None

    def ask_texts(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> EngineQuestion[list[str]] | None:
        """Return the request for the text of each list of ids; None if the engine has none."""
        return None

    def ask_reasoning(self, text: str, parser: str) -> EngineQuestion[tuple[str, str]] | None:
        """Return the request that splits a complete answer into reasoning and the rest; None if the engine has none."""
        return None

    def ask_calls(self, text: str, tools: Sequence[Any], parser: str) -> EngineQuestion[tuple[str, list[Any]]] | None:
        """Return the request that extracts tool calls from a complete answer; None if the engine has none. Its result
        is the text without the calls, and the calls with `name` and `parameters`."""
        return None

    def tokenize_body(self, text: str) -> bytes:
        """Return the body of a `tokenize` request."""
        raise CannotServe("the engine cannot tokenize")

    def tokens(self, answer: bytes) -> list[int] | None:
        """Return the ids in an answer of `tokenize`; None if it has none."""
        return None

    @staticmethod
    def overflow(message: str) -> Overflow | None:
        """Parse an error message of the engine about the context window; None if the message is about something
        else."""
        return None

    @abstractmethod
    def takes_cache_key(self, facts: Facts, path: str) -> bool:
        """Return whether the facts confirm that a key separates the prefix caches of requests to this path."""

    @abstractmethod
    def with_cache_key(self, body: bytes, key: str) -> bytes:
        """Return the request with this key in front of the client's own. An unreadable request stays as it is: the
        engine reports what is wrong with it."""

    @abstractmethod
    def order(self, action: Action) -> Order:
        """Return the control request for an action. Every engine supports pause, continue, abort and flush.

        Raises:
            CannotServe: the engine does not support the action.
        """

    def refused(self, answer: bytes) -> bool:
        """Return whether an answer to a control request reports that nothing was done, whatever its status."""
        return False

    @classmethod
    def own_request(cls, path: str) -> ControlRequest | None:
        """Return the parser for a user-defined control path; None if the path is not recognized."""
        return None

    @classmethod
    def read(cls, path: str, arguments: Arguments) -> Action | None:
        """Return the action of a control request as this engine reads it; None if it has no such request.

        Raises:
            BadArguments: the arguments are invalid.
        """
        request = next((each for each in cls.control if each.path == path), None)
        return None if request is None else request.read(arguments)

    def supported_pause(self, pause: Pause) -> Pause:
        """Return the pause to send to this engine; `pauses` replaces a mode that the engine does not have."""
        return Pause(self.pauses.get(pause.mode, pause.mode))

    @staticmethod
    def rank_wish(path: str, headers: Headers, body: bytes, parse: Parse) -> RankWish:
        """Return the rank that the client asks for. Raises any error of `parse`."""
        return NO_WISH

    def ranks(self, facts: Facts) -> int:
        """Return the number of data-parallel ranks that requests can be pinned to."""
        return 1

    def pinned(
        self, path: str, headers: Headers, body: bytes, rank: int, *, encoded: bool
    ) -> tuple[Headers, bytes] | None:
        """Return the headers and body that pin a request to one rank; None if the engine chooses the rank.

        Args:
            encoded: the body is compressed, so that no field can be added.
        """
        return None

    def rank_reader(self, path: str, *, streamed: bool) -> ReadRank | None:
        """Return a reader for the answering rank; None if answers do not contain it."""
        return None

    def paired(self, path: str, body: bytes, parse: Parse) -> PairedRequest:
        """Return the request for both halves of a prefill/decode pair of this engine.

        Raises:
            CannotServe: a pair would answer differently or not at all.
            Exception: any error of `parse`.
        """
        raise CannotServe("the engine does not support prefill/decode pairs")

    def with_room(self, body: bytes, host: str, port: int, room: int) -> bytes:
        """Return the request with the host, port and room (bootstrap id) through which the halves transfer the KV
        cache."""
        raise CannotServe("the engine does not support prefill/decode pairs")

    def translate(self, path: str, body: bytes, parse: Parse) -> Translation | Parts | None:
        """Return the request in the engine's own form; None if it passes unchanged.

        Raises:
            CannotServe: the engine would not answer as the client means it.
            UnknownShape: the request cannot be read.
        """
        return None
