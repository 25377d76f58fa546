"""`ServerManager`: token ids in, token ids out, each rollout on one worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from miles_router.client.answers import Generation
from miles_router.client.errors import InvalidReply
from miles_router.client.router_client import RouterClient
from miles_router.trajectory.sample import ShapedRows

MEDIA = ("image_data", "video_data", "audio_data", "mm_processor_kwargs")


@dataclass(frozen=True)
class RolloutConfig:
    """The settings of a rollout, by the names that they have in `actor_rollout_ref.rollout` and its `multi_turn`.

    Attributes:
        prompt_length: tokens of a first prompt at most.
        response_length: tokens behind it at most, those of tools included.
        enable_rollout_routing_replay: whether outputs have the routed experts; the router needs
            `RoutedExpertsMiddleware`.
        default_agent_loop: of a sample that names none.
        max_assistant_turns, max_user_turns: generations, and answers of tools, at most; None: as many as fit.
        max_parallel_calls: of the tool calls in one turn the first so many are made, at once; others are dropped.
        max_tool_response_length: characters of a tool's answer; a longer one loses its `tool_response_truncate_side`:
            `left`, `right` or `middle`.
    """

    prompt_length: int = 512
    response_length: int = 512
    enable_rollout_routing_replay: bool = False
    default_agent_loop: str = "single_turn_agent"
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_parallel_calls: int = 1
    max_tool_response_length: int = 256
    tool_response_truncate_side: str = "middle"


@dataclass
class TokenOutput:
    """One generation.

    Attributes:
        token_ids: what was sampled.
        log_probs: one for each of them, where `logprobs` was asked for.
        routed_experts: of prompt and output, [tokens - 1, layers, top_k], where they were asked for.
        stop_reason: `stop`, `length` or `abort`.
        num_preempted: how often the engine put it back.
        extra_fields: `global_steps`, `min_global_steps`, `max_global_steps`: the last, first and last weight version of
            its tokens, as numbers where they are such.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: ShapedRows | None = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class ServerManager:
    """Generates token ids from token ids. All generations of one request id go to one worker while it is routable; the
    router remembers the ids used last, and forgets the others.

    Args:
        config: for the tokens of a generation whose sampling parameters name no bound, and for routed experts.
    """

    def __init__(self, client: RouterClient, config: RolloutConfig | None = None) -> None:
        self._client = client
        self._config = config or RolloutConfig()

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Iterable[int],
        sampling_params: Mapping[str, Any],
        priority: int = 0,
        **fields: Any,
    ) -> TokenOutput:
        """One generation.

        Args:
            request_id: of the whole rollout; each generation has an id of its own at the engine.
            sampling_params: the engine's; besides `logprobs`, and `max_tokens` for `max_new_tokens`.
            priority: the engine's, where it is not 0.
            fields: further fields of `/generate`. Those of other media may be there if they are empty.

        Raises:
            ValueError: images and the like, logprobs of the prompt, or no room for a token behind the prompt.
            RouterClientError: as of `RouterClient.generate`; InvalidReply: the answer is to another prompt, or its
                logprobs are those of other tokens.
        """
        if media := [name for name in MEDIA if fields.pop(name, None)]:
            raise ValueError(f"{media[0]}: only token ids go through the router")
        prompt = [int(token) for token in prompt_ids]
        params = dict(sampling_params)
        logprobs = bool(params.pop("logprobs", False))
        if params.pop("prompt_logprobs", None) is not None:
            raise ValueError("prompt_logprobs: logprobs of the prompt are not asked for; score it with the trainer")
        bound = params.pop("max_tokens", None)
        params.setdefault("max_new_tokens", self._room(prompt) if bound is None else bound)
        if priority:
            fields["priority"] = int(priority)
        generation = await self._client.generate(
            input_ids=prompt,
            sampling_params=params,
            rid=uuid4().hex,
            routing_key=str(request_id),
            return_logprob=logprobs,
            **fields,
        )
        return await self._output(generation, prompt, logprobs=logprobs)

    def _room(self, prompt: Sequence[int]) -> int:
        config = self._config
        room = min(config.response_length, config.prompt_length + config.response_length - len(prompt))
        if room < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room: set max_new_tokens, or longer lengths")
        return room

    async def _output(self, generation: Generation, prompt: Sequence[int], *, logprobs: bool) -> TokenOutput:
        meta, ids = generation.meta_info, generation.output_ids
        if generation.prompt_tokens != len(prompt):
            raise InvalidReply(
                f"generation {generation.rid} is of {generation.prompt_tokens} tokens, not {len(prompt)}"
            )
        told = meta.get("output_token_logprobs") or []
        if logprobs and [entry[1] for entry in told] != ids:
            raise InvalidReply(f"generation {generation.rid} has logprobs of other tokens than it sampled")
        experts = None
        if self._config.enable_rollout_routing_replay and ids:
            experts = await self._client.routed_experts(rid=generation.rid)
        return TokenOutput(
            token_ids=ids,
            log_probs=[entry[0] for entry in told] if logprobs else None,
            routed_experts=experts,
            stop_reason=generation.finish_reason,
            num_preempted=meta.get("num_retractions"),
            extra_fields=_steps(meta),
        )


def _steps(meta: Mapping[str, Any]) -> dict[str, Any]:
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version")}]
    steps = [int(version) if str(version).isdecimal() else version for version in (span["version"] for span in spans)]
    return {"global_steps": steps[-1], "min_global_steps": steps[0], "max_global_steps": steps[-1]}
