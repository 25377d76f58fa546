"""`ServerManager`: generates token ids from token ids, each rollout on one worker."""

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
    """The settings of a rollout, with their names in `actor_rollout_ref.rollout` and its `multi_turn`.

    Attributes:
        prompt_length: most tokens of a first prompt.
        response_length: most tokens after it, including the tokens of tool results.
        enable_rollout_routing_replay: whether outputs have the routed experts; the router needs
            `RoutedExpertsMiddleware`.
        default_agent_loop: the loop of a sample without `agent_name`.
        max_assistant_turns, max_user_turns: most generations, and most turns of tool answers; None: no limit.
        max_parallel_calls: most tool calls made in one turn, all at once; further calls are dropped.
        max_tool_response_length: most characters of a tool's answer; a longer one is cut at its
            `tool_response_truncate_side`: `left`, `right` or `middle`.
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
        token_ids: the sampled ids.
        log_probs: one for each of them, if `logprobs` was requested.
        routed_experts: of prompt and output, [tokens - 1, layers, top_k], if they were requested.
        stop_reason: `stop`, `length` or `abort`.
        num_preempted: how often the engine preempted the generation; None if it does not report that.
        extra_fields: `global_steps`, `min_global_steps`, `max_global_steps`: the last, first and last weight version of
            its tokens, as integers if they are decimal.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: ShapedRows | None = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class ServerManager:
    """A generator of token ids from token ids. All generations of one request id go to one worker while it is routable;
    the router remembers the most recently used ids.

    Args:
        config: the lengths that bound a generation without a bound in its sampling parameters, and whether to return
            routed experts.
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
        """Generate once.

        Args:
            request_id: the id of the whole rollout; each generation has an id of its own at the engine.
            sampling_params: the engine's, plus `logprobs`, and `max_tokens` as another name of `max_new_tokens`.
            priority: the engine's; not sent if 0.
            fields: further fields of `/generate`. Fields of other media are allowed if they are empty.

        Raises:
            ValueError: the call has images or other media, asks for logprobs of the prompt, or leaves no room for
                output.
            RouterClientError: as in `RouterClient.generate`.
            InvalidReply: the reply is about another prompt, or its logprobs belong to other tokens.
        """
        if media := [name for name in MEDIA if fields.pop(name, None)]:
            raise ValueError(f"{media[0]}: not supported, the router takes token ids only")
        prompt = [int(token) for token in prompt_ids]
        params = dict(sampling_params)
        logprobs = bool(params.pop("logprobs", False))
        if params.pop("prompt_logprobs", None) is not None:
            raise ValueError("prompt_logprobs: not supported; compute logprobs of the prompt in the trainer")
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
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room: set max_new_tokens, or a larger prompt_length"
            )
        return room

    async def _output(self, generation: Generation, prompt: Sequence[int], *, logprobs: bool) -> TokenOutput:
        meta, ids = generation.meta_info, generation.output_ids
        if generation.prompt_tokens != len(prompt):
            raise InvalidReply(
                f"generation {generation.rid}: the engine read {generation.prompt_tokens} tokens, not {len(prompt)}"
            )
        entries = meta.get("output_token_logprobs") or []
        if logprobs and [entry[1] for entry in entries] != ids:
            raise InvalidReply(f"generation {generation.rid} has logprobs of other tokens than it sampled")
        experts = None
        if self._config.enable_rollout_routing_replay and ids:
            experts = await self._client.routed_experts(rid=generation.rid)
        return TokenOutput(
            token_ids=ids,
            log_probs=[entry[0] for entry in entries] if logprobs else None,
            routed_experts=experts,
            stop_reason=generation.finish_reason,
            num_preempted=meta.get("num_retractions"),
            extra_fields=_steps(meta),
        )


def _steps(meta: Mapping[str, Any]) -> dict[str, Any]:
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version")}]
    steps = [int(version) if str(version).isdecimal() else version for version in (span["version"] for span in spans)]
    return {"global_steps": steps[-1], "min_global_steps": steps[0], "max_global_steps": steps[-1]}
