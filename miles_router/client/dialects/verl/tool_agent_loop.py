"""`ToolAgentLoop`: turns of a model and its tools as one growing sequence of token ids, which is never encoded
again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from miles_router.client.dialects.verl.agent_loop import AgentLoop, AgentLoopMetrics, AgentLoopOutput, register
from miles_router.client.dialects.verl.server_manager import TokenOutput
from miles_router.client.dialects.verl.tools import FunctionCall, call_tool, shorten
from miles_router.tasks import together
from miles_router.trajectory.sample import ShapedRows


@dataclass
class Episode:
    """The state of one rollout.

    Attributes:
        prompt: the ids of the first prompt.
        response, mask, logprobs: of the tokens after it; all of one length.
        last: the last generation.
    """

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last: TokenOutput | None = None
    generations: int = 0
    tool_turns: int = 0
    tool_rewards: list[float] = field(default_factory=list)
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    steps: dict[str, Any] = field(default_factory=dict)

    def add_generation(self, output: TokenOutput) -> None:
        self._add(output.token_ids, 1, output.log_probs)
        self.last = output
        self.generations += 1
        self.steps = {**output.extra_fields, **_first(self.steps)}
        if output.num_preempted is not None:
            self.metrics.num_preempted = max(0, self.metrics.num_preempted) + output.num_preempted

    def add_tool_answers(self, ids: Sequence[int]) -> None:
        self._add(ids, 0, None)
        self.tool_turns += 1

    def _add(self, ids: Sequence[int], mask: int, logprobs: Sequence[float] | None) -> None:
        self.response += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)

    def output(self, longest: int) -> AgentLoopOutput:
        """Return the rollout, with at most `longest` tokens of response."""
        last = self.last
        assert last is not None
        rows: ShapedRows | None = last.routed_experts
        return AgentLoopOutput(
            prompt_ids=self.prompt,
            response_ids=self.response[:longest],
            response_mask=self.mask[:longest],
            response_logprobs=None if last.log_probs is None else self.logprobs[:longest],
            routed_experts=None if rows is None else rows[: len(self.prompt) + longest],
            num_turns=1 + self.generations + self.tool_turns,
            metrics=self.metrics,
            extra_fields={
                **self.steps,
                "turn_scores": [],
                "tool_rewards": self.tool_rewards,
                "stop_reason": last.stop_reason,
            },
        )


def _first(steps: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in steps.items() if name == "min_global_steps"}


@register("tool_agent")
class ToolAgentLoop(AgentLoop):
    """A loop of generations and tool calls. All calls of one turn run at once. The loop ends when the model makes no
    call, when a generation is aborted, or when turns or tokens run out."""

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        request_id, episode = uuid4().hex, Episode(self.prompt_ids(fields["raw_prompt"], self.tool_schemas))
        while True:
            output = await self._generate(request_id, episode, sampling_params)
            calls = self.tool_parser(self.chat.text(output.token_ids))[: self.config.max_parallel_calls]
            if not calls or self._is_over(episode, output):
                break
            messages = await self._call(calls, episode)
            ids = self.chat.continuation(messages, output.token_ids, self.tool_schemas)
            if len(episode.response) + len(ids) >= self.config.response_length:
                break
            episode.add_tool_answers(ids)
        return episode.output(self.config.response_length)

    async def _generate(self, request_id: str, episode: Episode, sampling_params: Mapping[str, Any]) -> TokenOutput:
        left = self.config.response_length - len(episode.response)
        bound = sampling_params.get("max_new_tokens", sampling_params.get("max_tokens", left))
        params = {name: value for name, value in sampling_params.items() if name != "max_tokens"}
        with episode.metrics.measure("generate_sequences"):
            output = await self.server_manager.generate(
                request_id,
                prompt_ids=[*episode.prompt, *episode.response],
                sampling_params={**params, "max_new_tokens": min(bound, left)},
            )
        episode.add_generation(output)
        return output

    def _is_over(self, episode: Episode, output: TokenOutput) -> bool:
        config = self.config
        return (
            output.stop_reason == "abort"
            or len(episode.response) >= config.response_length
            or episode.generations == config.max_assistant_turns
            or episode.tool_turns == config.max_user_turns
        )

    async def _call(self, calls: Sequence[FunctionCall], episode: Episode) -> list[dict[str, str]]:
        answers: dict[int, tuple[str, float | None]] = {}

        async def one(index: int) -> None:
            answers[index] = await call_tool(calls[index], self.tools)

        with episode.metrics.measure("tool_calls"):
            await together([one(index) for index in range(len(calls))], name="tool")
        in_order = [answers[index] for index in range(len(calls))]
        episode.tool_rewards += [reward for _, reward in in_order if reward is not None]
        length, side = self.config.max_tool_response_length, self.config.tool_response_truncate_side
        return [{"role": "tool", "content": shorten(text, length, side)} for text, _ in in_order]
