"""OpenAISessionMiddleware: exact training samples of agents that know nothing but an OpenAI `base_url`.

An agent talks to `http://router/sessions/<id>/v1`. Its first turn goes to the engine unchanged. Every later turn goes
as the recorded ids of earlier turns, followed by the ids of what the agent appended. The trainer reads the session's
turns, or training samples made of them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.routing import BaseRoute

from middleware_hub.auditing.audits import Audits
from middleware_hub.auditing.routes import audit_routes, audited_episode
from middleware_hub.auditing.teachers import Teachers
from middleware_hub.openai_session.agent_apis import AGENT_APIS
from middleware_hub.openai_session.agent_apis.agent_api import RunPolicy, RunSettings
from middleware_hub.openai_session.archive.archive import SessionArchive
from middleware_hub.openai_session.audit.auditor import SessionAuditor
from middleware_hub.openai_session.audit.prompts import PromptCheck
from middleware_hub.openai_session.continuing.comparison import Comparison
from middleware_hub.openai_session.continuing.continuation import build
from middleware_hub.openai_session.dashboard.episodes import KIND, SessionEpisodes
from middleware_hub.openai_session.dashboard.trained import count_read
from middleware_hub.openai_session.dialects import DIALECTS, FORMS
from middleware_hub.openai_session.episodes.contract import REFUSE
from middleware_hub.openai_session.export.routes import SessionRoutes
from middleware_hub.openai_session.export.samples import CONCAT, SampleMaker, checked_defaults
from middleware_hub.openai_session.export.selection import Selection
from middleware_hub.openai_session.sessions.contents import REFUSE_FIRST
from middleware_hub.openai_session.sessions.equality import equality
from middleware_hub.openai_session.sessions.store import (
    ID,
    PREFIX,
    SESSIONS,
    Bounds,
    SessionStore,
    path_in_session,
    resolve,
    session_key,
)
from middleware_hub.openai_session.turns.endpoint import SessionEndpoint
from middleware_hub.openai_session.turns.keeper import EpisodeKeeper
from middleware_hub.openai_session.turns.plan import StreamFacts
from middleware_hub.openai_session.turns.recorder import TurnRecorder
from middleware_hub.openai_session.turns.run_turn import TurnRunner
from middleware_hub.openai_session.turns.sampling import SamplingServices
from middleware_hub.tokenizing.agreement import TokenizerAgreement
from middleware_hub.tokenizing.async_encoder import AsyncEncoder
from middleware_hub.tokenizing.naming import TokenNames
from miles_router.engines.parsers import Parsers
from miles_router.errors import ConfigError
from miles_router.middlewares import (
    ASGIApp,
    HasDataPaths,
    HasKeys,
    HasLifespan,
    HasRoutes,
    Receive,
    Router,
    Scope,
    Send,
    first_header,
)
from miles_router.middlewares.rows import RowSource
from miles_router.middlewares.state import BODY_SAYS, HasOwners, Restores

NAME = "openai_sessions"
GIB = 1024**3


class OpenAISessionMiddleware:
    """The middleware that traces sessions.

    Args:
        tito_model: the model's family, if a library knows how it continues a chat (qwen3, qwen3.5, glm-4.7, ...); by
            default the model's own chat template is used.
        message_equality: decides whether a message that an agent sends back equals the recorded one: `meaning`,
            `strict`, `tool-arguments-as-json`, or the dotted path of a function `(held, sent)`.
        branch_policies: dotted paths of functions that a request for samples may name as `branches`.
        default_branches: the branches of a request that names none; empty means all, and the last one in miles' form.
        default_build: how samples are built by default: `concat` or `last_step`.
        default_mask: the masks of a request that names none.
        default_side_calls: whether side calls of a harness (titles, probes, sub-agents) become samples by default.
        lora_path: the engine's name of the adapter that answers every turn, whatever an agent asks for.
        chat_template_kwargs: template settings of every turn; an agent's own values take precedence.
        parsers: which parsers read the reasoning and tool calls of an answer that was sampled in several attempts:
            `engine`, the engine's; `local`, the router's for the family of `tito_model`; `hybrid`, the router's where
            the engine's fail, and to show text after a cut at once.
        whole_answers: whether the engine answers streamed chat turns without streaming, and the router streams the
            result. Needed behind another router, where a stream's weight versions are not known.
        max_sessions: the most sessions.
        max_turns: the most turns of one session.
        max_session_bytes: the most bytes of one session, messages and arrays.
        max_bytes: the most bytes of all sessions.
        idle_timeout: seconds without use after which a session expires; 0 for never.
        header_sessions: whether `X-Session-Id` on a path of an agent API also selects a session.
        context_window: tokens of prompt and answer of a turn in sessions named by a header; 0 for the engine's limit.
        one_weight_version: whether such a session refuses turns once the fleet's weights differ from the weights of its
            turns.
        media: the policy for images and other media: `refuse_first` refuses them in a session's first turn and replaces
            them by a fixed text later; `refuse` and `replace` always do the same. A session's contract takes
            precedence.
        unknown_fields: the policy for fields that the Messages and Responses APIs do not have: `refuse`, or `record`,
            which ignores them and names them in the turn's record.
    """

    one_model = True

    def __init__(
        self,
        app: ASGIApp,
        *,
        router: Router,
        tito_model: str = "",
        message_equality: str = "meaning",
        branch_policies: tuple[str, ...] = (),
        default_branches: str = "",
        default_build: str = CONCAT,
        default_mask: tuple[str, ...] = (),
        default_side_calls: bool = True,
        lora_path: str = "",
        chat_template_kwargs: dict[str, Any] | None = None,
        parsers: str = "hybrid",
        whole_answers: bool = False,
        max_sessions: int = 100_000,
        max_turns: int = 2_000,
        max_session_bytes: int = 256 * 1024 * 1024,
        max_bytes: int = 16 * GIB,
        idle_timeout: float = 3600.0,
        header_sessions: bool = True,
        context_window: int = 0,
        one_weight_version: bool = False,
        media: str = REFUSE_FIRST,
        unknown_fields: str = REFUSE,
    ) -> None:
        bounds = Bounds(max_sessions, max_turns, max_session_bytes, max_bytes, idle_timeout)
        bounds.check("openai_session_middleware")
        self.app = app
        durable, held = router.store is not None, f"sessions{router.mount.replace('/', '-')}"
        held_names = None if durable else router.owners.held_names(held, max_sessions)
        equal = equality(message_equality)
        self.store = SessionStore(
            bounds, now=time.time, clock=time.monotonic, owners=router.owners, names=held_names, equal=equal
        )
        self.store.when_over = router.end_session
        self._encoder = AsyncEncoder.of(router)
        self._agreement = TokenizerAgreement.of(router)
        continuation = build(router.tokenizer, tito_model or None, self._encoder)
        text_of = self._encoder.encoder.text_of
        recorder = TurnRecorder(self.store, continuation.is_special, text_of, now=time.time, run=router.run)
        settings = RunSettings(lora_path, chat_template_kwargs or {}, RunPolicy.checked(media, unknown_fields))
        agent_apis = [api(continuation, equal, settings) for api in AGENT_APIS]
        try:
            known = Parsers.from_settings(parsers, tito_model or None)
        except ValueError as error:
            raise ConfigError(f"openai_session_middleware.{error}") from None
        backend = getattr(router.tokenizer, "backend_tokenizer", None)
        names = TokenNames(backend, router.model_config.get("vocab_size"))
        sampling = SamplingServices(app, router, recorder, known, names, StreamFacts(router))
        self._archive = archive = SessionArchive(self.store, router, now=time.time, clock=time.monotonic)
        keeper = EpisodeKeeper(router, self.store, archive, clock=time.monotonic)
        heartbeat = router.config.heartbeat_interval
        runner = TurnRunner(
            app,
            router,
            self.store,
            archive,
            keeper,
            recorder,
            sampling,
            settings,
            now=time.time,
            whole_answers=whole_answers,
            heartbeat=heartbeat,
        )
        self._endpoint = SessionEndpoint(app, agent_apis, self.store, archive, runner)
        selection = Selection(branch_policies, default_branches)
        defaults = checked_defaults("openai_session_middleware", default_build, default_mask)
        read = partial(count_read, router.run)
        maker = SampleMaker(
            selection, router.tokenizer.decode, router.rows, *defaults, default_side_calls, read, router.config.model_id
        )
        router.episodes[KIND] = SessionEpisodes(self.store, self._archive, maker)
        teachers = Teachers.of(router)
        self._sessions = SessionRoutes(self.store, self._archive, maker, router.base_url, keeper.stop, teachers)
        self._audits, check = Audits.of(router), PromptCheck(continuation, router.tokenizer.decode)
        self._auditor = SessionAuditor(self.store, self._archive, self._audits.asker, check)
        self._audits.add(KIND, self._auditor)
        longest, skip = router.config.max_text_chars, self.store.statistics.count_uncompared
        comparison = Comparison(continuation.renderer, longest=longest, skip=skip)
        self._sessions.forms += [form(self._sessions, comparison, router.args) for form in FORMS]
        for kind, channel in router.rows.items():
            channel.sources["session_id"] = RowSource(
                partial(self._sessions.rows, kind),
                fields=("leaf",),
                require=self._sessions.require,
                bring=self._archive.load,
            )
        dialects = DIALECTS if header_sessions else ()
        if context_window < 0:
            raise ConfigError("openai_session_middleware.context_window must be 0 or a number of tokens")
        options: Any = {"one_weight_version": one_weight_version, "context_window": context_window}
        self._dialects = [dialect(router, self._sessions, self._endpoint, **options) for dialect in dialects]
        router.publish(NAME, self.store.statistics, continuation=continuation.proof.describe)

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Run the processes that encode long texts, the expiry of archived sessions, and the comparison of worker
        tokenizers."""
        async with self._encoder.lifespan(), self._archive.running(), self._agreement.running():
            yield

    async def restore(self, scope: Scope) -> None:
        """Load the session that a request names, if it is in the archive but not in memory."""
        path: str = scope["path"]
        if path.startswith(PREFIX):
            await self._archive.load(path[len(PREFIX) :].partition("/")[0])
        elif (named := first_header(scope["headers"], b"x-session-id")) is not None:
            await self._archive.load(named.decode("latin-1"))

    def routes(self) -> Sequence[BaseRoute]:
        """Return the routes that create, read, list, delete, export and audit sessions, and the routes of the
        dialects."""
        own = [*self._sessions.routes(), *self._auditor.routes(), *audit_routes(self._audits)]
        return [*own, *(route for dialect in self._dialects for route in dialect.routes())]

    def data_paths(self) -> Sequence[str]:
        """Return the path prefix of agents' requests."""
        return [PREFIX]

    def key_of(self, path: str) -> str | None:
        """Return the API key that a session requires of its agent on this path, or None."""
        return session_key(self.store, path)

    def owner_name(self, scope: Scope) -> str | None:
        """Return the id of the session that a request is about, from its path or headers; None if there is none."""
        path = scope["path"]
        if path.startswith(PREFIX):
            return path[len(PREFIX) :].partition("/")[0] or None
        if path == SESSIONS:
            return BODY_SAYS if scope["method"] == "POST" else None
        if (episode := audited_episode(path)) is not None:
            return episode if ID.fullmatch(episode) else None  # other ids belong to other layers
        names = (dialect.owner_name(scope) for dialect in self._dialects)
        return next((name for name in names if name is not None), None)

    def shape_errors(self, scope: Scope) -> None:
        """Write the errors of a request within a session in the format of its agent API."""
        if scope["path"].startswith(PREFIX):
            self._endpoint.speak(scope, path_in_session(scope["path"]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Trace requests within sessions; forward all others unchanged."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"].startswith(PREFIX):
            self.shape_errors(scope)
            session, inner = resolve(self.store, scope)
            await self._endpoint.request(session, inner, receive, send)
        else:
            for dialect in self._dialects:
                if await dialect.answer(scope, receive, send):
                    return
            await self.app(scope, receive, send)


_lifespan: type[HasLifespan] = OpenAISessionMiddleware
_routes: type[HasRoutes] = OpenAISessionMiddleware
_data_paths: type[HasDataPaths] = OpenAISessionMiddleware
_keys: type[HasKeys] = OpenAISessionMiddleware
_restores: type[Restores] = OpenAISessionMiddleware
_owners: type[HasOwners] = OpenAISessionMiddleware
