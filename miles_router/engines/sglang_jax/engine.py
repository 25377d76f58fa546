"""SGLang-Jax as the router deals with it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from miles_router.engines.actions import Order
from miles_router.engines.engine import Documents, Parse, Translation
from miles_router.engines.facts import Facts
from miles_router.engines.sglang import paths
from miles_router.engines.sglang.engine import SGLang
from miles_router.engines.sglang.facts import model_and_server
from miles_router.engines.sglang_jax.generate import translate, translate_without_adapters

#: Of `/get_server_info`: an argument that no other engine has.
MARK = "precompile_token_paddings"


class SGLangJax(SGLang):
    """An engine that says about itself what SGLang says, and of which some requests and answers are translated.

    Args:
        adapters: whether it was started with `--enable-lora`.
    """

    kind = "sglang-jax"
    deep = Order("GET", paths.HEALTH_GENERATE[0].encode(), b"")  # `/health` says 200 whatever happens
    ready = well = None
    tells_version = False
    pauses: ClassVar[Mapping[str, str]] = {"abort": "retract"}  # it waits for ever for what it aborts in its queue
    sleeps = False  # it ends over it
    returns_aborted = False  # one that was retracted forgets what it has sampled
    chats_by_ids = False
    translates = True

    def __init__(self, *, adapters: bool) -> None:
        self._adapters = adapters

    @classmethod
    def recognized(cls, documents: Documents) -> SGLang | None:
        """Return it where an engine was started with an argument that it alone has."""
        _, server = model_and_server(documents)
        if MARK not in server:
            return None
        return WITH_ADAPTERS if server.get("enable_lora") else WITHOUT_ADAPTERS

    def facts(self, documents: Documents) -> Facts:
        return replace(super().facts(documents), incremental_streaming=False)  # each event says all so far

    def translate(self, path: str, body: bytes, parse: Parse) -> Translation | None:
        return translate(path, body, parse) if self._adapters else translate_without_adapters(path, body, parse)


WITH_ADAPTERS, WITHOUT_ADAPTERS = SGLangJax(adapters=True), SGLangJax(adapters=False)
