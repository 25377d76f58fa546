"""What can be wrong with routed experts.

NotFound
└── ExpertsNotHeld     404 routed_experts_not_held: the trajectory is known, its rows are not (any more)
UpstreamError
└── ExpertsMissing     502 routed_experts_missing: a worker that does not tell them
"""

from __future__ import annotations

from miles_router.errors import NotFound, UpstreamError


class ExpertsNotHeld(NotFound):
    """The trajectory is known, but its routed experts never came, did not fit, or have been evicted."""

    type = "routed_experts_not_held"


class ExpertsMissing(UpstreamError):
    """A worker answered without routed experts, which `RoutedExpertsMiddleware` requires."""

    type = "routed_experts_missing"

    def __init__(self, worker_url: str | None, remedy: str) -> None:
        super().__init__(
            f"worker {worker_url} answered without routed experts: {remedy}, "
            "or set routed_experts_middleware.required=false to go on without"
        )
