"""The model list for agents whose contract names their model: only that model, under the contract's name."""

from __future__ import annotations

from typing import Any

import orjson

from miles_router.engines.paths import MODELS
from miles_router.errors import NotFound
from miles_router.middlewares import ASGIApp, Collected, Receive, Scope, Send


async def shown_models(name: str, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer `GET /v1/models` and `/v1/models/{model}` with the one model of the session's contract.

    Args:
        name: the model's name in the contract.
        app: forwards a request to a worker; the first model that the worker lists is shown under `name`.

    Raises:
        NotFound: the path names another model.
    """
    path = scope["path"]
    if path not in (MODELS, f"{MODELS}/{name}"):
        raise NotFound(f"the only model of this session is {name!r}")
    collected = Collected()
    await collected.call(app, {**scope, "path": MODELS, "raw_path": MODELS.encode(), "query_string": b""}, receive)
    listed = collected.parse() if collected.status == 200 and collected.is_json else None
    if not isinstance(listed, dict) or not isinstance(listed.get("data"), list):
        await collected.give_to(send)
        return
    shown = [_named(card, name) for card in (listed["data"] or [None])[:1]]
    await collected.give_to(send, orjson.dumps({**listed, "data": shown} if path == MODELS else shown[0]))


def _named(card: Any, name: str) -> dict[str, Any]:
    known = card if isinstance(card, dict) else {"object": "model"}
    return {**known, "id": name, **({"root": name} if "root" in known else {})}
