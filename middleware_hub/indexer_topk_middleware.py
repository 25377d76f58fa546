"""IndexerTopkMiddleware: the positions that sparse attention chose for each token, kept for replay in training.

It keeps them as RoutedExpertsMiddleware keeps experts, by the same code; the two may be listed together.
"""

from __future__ import annotations

from middleware_hub.routed_experts.keeper import MAX_BYTES, RowKeeper
from middleware_hub.routed_experts.shapes import configured_indexer_shape, parse_indexer_shape
from miles_router.engines.rows import INDEXER_FIELDS
from miles_router.middlewares import ASGIApp, Router


class IndexerTopkMiddleware(RowKeeper):
    """The keeper of chosen positions. It is listed last, inside of the layers that hold trajectories.

    Args:
        indexer_shape: the model's, as LAYERSxTOPK (61x2048); without it, that of the checkpoint's config.json.
        required: whether an answer without chosen positions is an error; if not, samples say that theirs are missing.
        max_bytes: bytes of rows held; the least recently used go first.
    """

    fields = INDEXER_FIELDS
    shape_option = "indexer_shape"

    def __init__(
        self,
        app: ASGIApp,
        *,
        router: Router,
        indexer_shape: str = "",
        required: bool = True,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        shape = parse_indexer_shape(indexer_shape) if indexer_shape else configured_indexer_shape(router.model_config)
        super().__init__(app, router, shape, required, max_bytes)
