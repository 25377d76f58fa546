"""SGLang-Jax as the router deals with it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from miles_router.engines import paths
from miles_router.engines.engine import Documents, Engine, Parse, Translation
from miles_router.engines.facts import Facts
from miles_router.engines.sglang.facts import model_and_server, read_facts, sampling_version
from miles_router.engines.sglang_jax.generate import translate, translate_without_adapters

#: Of `/get_server_info`: an argument that no other engine has.
MARK = "precompile_token_paddings"


class SGLangJax(Engine):
    """An engine of which some requests and answers are translated. It says about itself what SGLang says.

    Args:
        adapters: whether it was started with `--enable-lora`.
    """

    kind = "sglang-jax"
    alive = paths.MODEL_INFO
    scheduler = paths.SERVER_INFO
    deep = paths.HEALTH_GENERATE[0]  # `/health` says 200 whatever happens
    token = paths.HEALTH_GENERATE
    documents = (paths.MODEL_INFO, paths.SERVER_INFO, paths.SCHEMA)
    tells_version = False
    pauses: ClassVar[Mapping[str, str]] = {"abort": "retract"}  # it waits for ever for what it aborts in its queue
    sleeps = False  # it ends over it
    returns_aborted = False  # one that was retracted forgets what it has sampled
    translates = True

    def __init__(self, *, adapters: bool) -> None:
        self._adapters = adapters

    @classmethod
    def recognized(cls, documents: Documents) -> SGLangJax | None:
        """Return it where an engine was started with an argument of its own."""
        _, server = model_and_server(documents)
        if MARK not in server:
            return None
        return WITH_ADAPTERS if server.get("enable_lora") else WITHOUT_ADAPTERS

    def facts(self, documents: Documents) -> Facts:
        return replace(read_facts(documents, streams_all=True), engine=self)

    def has_said_all(self, documents: Documents) -> bool:
        return None not in (documents.get(paths.MODEL_INFO[0]), documents.get(paths.SERVER_INFO[0]))

    def sampling_version(self, said: bytes) -> str | None:
        return sampling_version(said)

    def translate(self, path: str, body: bytes, parse: Parse) -> Translation | None:
        return translate(path, body, parse) if self._adapters else translate_without_adapters(path, body, parse)


WITH_ADAPTERS, WITHOUT_ADAPTERS = SGLangJax(adapters=True), SGLangJax(adapters=False)
