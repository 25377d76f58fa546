"""The `Engine` for SGLang-Jax. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from miles_router.engines.actions import Order
from miles_router.engines.engine import Documents, Parse, Translation
from miles_router.engines.facts import Facts
from miles_router.engines.sglang import paths
from miles_router.engines.sglang.engine import SGLang, model_and_server
from miles_router.engines.sglang_jax.generate import translate, translate_without_adapters

#: A field of `/get_server_info` that no other engine has.
JAX_ONLY_FIELD = "precompile_token_paddings"


class SGLangJax(SGLang):
    """An engine with SGLang's documents, whose requests and answers need some translation.

    Args:
        adapters: whether the server was started with `--enable-lora`.
    """

    kind = "sglang-jax"
    deep = Order("GET", paths.HEALTH_GENERATE[0].encode(), b"")  # `/health` always answers 200
    ready = well = None
    tells_version = False
    # In mode `abort` the engine waits forever for the queued requests that it aborts.
    pauses: ClassVar[Mapping[str, str]] = {"abort": "retract"}
    sleeps = False  # the server process ends when it releases memory
    returns_aborted = False  # a retracted generation loses its sampled tokens
    chats_by_ids = False
    translates = True

    def __init__(self, *, adapters: bool) -> None:
        self._adapters = adapters

    @classmethod
    def recognized(cls, documents: Documents) -> SGLang | None:
        """Return the engine if the server reports an argument that only SGLang-Jax has."""
        _, server = model_and_server(documents)
        if JAX_ONLY_FIELD not in server:
            return None
        return WITH_ADAPTERS if server.get("enable_lora") else WITHOUT_ADAPTERS

    def facts(self, documents: Documents) -> Facts:
        return replace(super().facts(documents), incremental_streaming=False)  # each event repeats everything so far

    def translate(self, path: str, body: bytes, parse: Parse) -> Translation | None:
        return translate(path, body, parse) if self._adapters else translate_without_adapters(path, body, parse)


WITH_ADAPTERS, WITHOUT_ADAPTERS = SGLangJax(adapters=True), SGLangJax(adapters=False)
