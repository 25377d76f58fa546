"""RoutedExpertsMiddleware: keeps the experts to which each token was routed, for replay in training (R3)."""

from __future__ import annotations

from middleware_hub.routed_experts.keeper import MAX_BYTES, RowKeeper
from middleware_hub.routed_experts.shapes import configured_shape, parse_shape
from miles_router.engines.rows import EXPERT_FIELDS
from miles_router.middlewares import ASGIApp, Router


class RoutedExpertsMiddleware(RowKeeper):
    """The layer that keeps routed experts. List it last, inside the layers that hold trajectories.

    Args:
        moe_shape: the model's shape as LAYERSxEXPERTSxTOPK (48x128x8); by default from the checkpoint's config.json.
        required: whether an answer without routed experts is an error; if not, samples report them as missing.
        max_bytes: limit of rows in memory; the least recently used are evicted first.
    """

    fields = EXPERT_FIELDS
    shape_option = "moe_shape"

    def __init__(
        self,
        app: ASGIApp,
        *,
        router: Router,
        moe_shape: str = "",
        required: bool = True,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        shape = parse_shape(moe_shape) if moe_shape else configured_shape(router.model_config)
        super().__init__(app, router, shape, required, max_bytes)
