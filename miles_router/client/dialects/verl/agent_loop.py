"""Agent loops: classes that make one rollout, registered by name, and a worker that runs many of them."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from miles_router.client.dialects.verl.chat_template import ChatTemplate, Messages
from miles_router.client.dialects.verl.server_manager import RolloutConfig, ServerManager
from miles_router.client.dialects.verl.tools import FunctionCall, FunctionTool, hermes_calls
from miles_router.tasks import together
from miles_router.trajectory.finite import require_finite
from miles_router.trajectory.sample import ShapedRows


@dataclass
class AgentLoopMetrics:
    """Seconds spent in generations, tools and rewards, and how often the engine preempted a generation (-1:
    unknown)."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the seconds spent in the block to the field `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - began)


@dataclass
class AgentLoopOutput:
    """One rollout, with the fields of verl's class of this name, which `AgentLoopOutput(**made.to_dict())` creates.

    Attributes:
        response_ids: all tokens after the prompt: sampled tokens and the tokens of tool results.
        response_mask: 1 for each sampled token, else 0.
        response_logprobs: 0.0 for tokens that were not sampled.
        routed_experts: of prompt and response, [rows, layers, top_k]; the last sampled token has no row.
        reward_score: None unless the loop computes it.
        num_turns: the number of turns of user, tools and model together.
        extra_fields: weight versions as `global_steps`, `min_global_steps`, `max_global_steps`; `turn_scores`,
            `tool_rewards`; `stop_reason` of the last generation.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: ShapedRows | None = None
    multi_modal_data: dict[str, Any] = field(default_factory=dict)
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, the metrics as plain numbers."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {**fields, "metrics": dataclasses.asdict(self.metrics)}


class AgentLoop(ABC):
    """The base class of loops. Each rollout has an instance of its own.

    Args:
        chat: the chat template of the model's tokenizer.
        tools: the tools that the model may call, for loops that use them.
        tool_parser: returns the calls in a text of the model.
    """

    def __init__(
        self,
        server_manager: ServerManager,
        chat: ChatTemplate,
        config: RolloutConfig,
        *,
        tools: Sequence[FunctionTool] = (),
        tool_parser: Callable[[str], list[FunctionCall]] = hermes_calls,
    ) -> None:
        self.server_manager = server_manager
        self.chat = chat
        self.config = config
        self.tools = {tool.name: tool for tool in tools}
        self.tool_schemas = [tool.schema for tool in tools if tool.schema is not None]
        self.tool_parser = tool_parser

    @abstractmethod
    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        """Make the rollout. `fields` are the fields of the data set's sample, among them `raw_prompt` (messages)."""

    def prompt_ids(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the token ids of the first prompt.

        Raises:
            ValueError: they are more than `prompt_length`.
        """
        ids = self.chat.prompt(messages, tools)
        if len(ids) > self.config.prompt_length:
            raise ValueError(f"a prompt of {len(ids)} tokens is longer than prompt_length {self.config.prompt_length}")
        return ids


Loop = TypeVar("Loop", bound=type[AgentLoop])
_loops: dict[str, type[AgentLoop]] = {}


def register(name: str) -> Callable[[Loop], Loop]:
    """Register a class under the `agent_name` of samples."""

    def decorate(loop: Loop) -> Loop:
        _loops[name] = loop
        return loop

    return decorate


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoop):
    """A loop of one generation."""

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        prompt, longest, metrics = (
            self.prompt_ids(fields["raw_prompt"]),
            self.config.response_length,
            AgentLoopMetrics(),
        )
        with metrics.measure("generate_sequences"):
            output = await self.server_manager.generate(
                uuid4().hex, prompt_ids=prompt, sampling_params=sampling_params, priority=fields.get("priority", 0)
            )
        metrics.num_preempted = -1 if output.num_preempted is None else output.num_preempted
        response, rows = output.token_ids[:longest], output.routed_experts
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=response,
            response_mask=[1] * len(response),
            response_logprobs=None if output.log_probs is None else output.log_probs[:longest],
            routed_experts=None if rows is None else rows[: len(prompt) + longest],
            num_turns=2,
            metrics=metrics,
            extra_fields={
                **output.extra_fields,
                "turn_scores": [],
                "tool_rewards": [],
                "stop_reason": output.stop_reason,
            },
        )


class AgentLoopWorker:
    """A runner of loops for many samples at once.

    Args:
        tokenizer: the model's, of `transformers`, or a `ChatTemplate`.
        options: further arguments of the loops' classes, for example `tools`.
    """

    def __init__(
        self, server_manager: ServerManager, tokenizer: Any, config: RolloutConfig | None = None, **options: Any
    ) -> None:
        self._server_manager = server_manager
        self._chat = tokenizer if isinstance(tokenizer, ChatTemplate) else ChatTemplate(tokenizer)
        self._config = config or RolloutConfig()
        self._options = options

    async def generate_sequences(
        self, samples: Sequence[Mapping[str, Any]], sampling_params: Mapping[str, Any]
    ) -> list[AgentLoopOutput]:
        """Return the rollouts of these samples, in their order. The first failure cancels the others and is raised.

        Args:
            samples: fields of the data set's samples: `raw_prompt`, `agent_name` if it is not the default, others.
        """
        made: dict[int, AgentLoopOutput] = {}

        async def one(index: int) -> None:
            made[index] = await self.run(sampling_params, **samples[index])

        await together([one(index) for index in range(len(samples))], name="agent loop")
        return [made[index] for index in range(len(samples))]

    async def run(
        self, sampling_params: Mapping[str, Any], *, agent_name: str | None = None, **fields: Any
    ) -> AgentLoopOutput:
        """Return the rollout of one sample.

        Raises:
            ValueError: no loop has this name, or a reward of the rollout is NaN or infinite.
        """
        name = agent_name or self._config.default_agent_loop
        if name not in _loops:
            raise ValueError(f"no agent loop {name!r} is registered; known loops: {', '.join(sorted(_loops))}")
        loop = _loops[name](self._server_manager, self._chat, self._config, **self._options)
        output = await loop.run(sampling_params, **fields)
        require_finite({"reward_score": output.reward_score, "extra_fields": output.extra_fields})
        if "raw_prompt" in fields:
            output.extra_fields["raw_prompt"] = fields["raw_prompt"]
        return output
