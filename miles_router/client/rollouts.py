"""Three rollouts to use as they are or to copy from: one turn, several turns with an environment, an agent.

Each takes the client first and returns samples for a trainer. Wrapped for slime or miles:

    async def generate(args, sample, sampling_params):
        made = await single_turn(client, sample.prompt, sampling_params, metadata=sample.metadata)
        return Sample.from_dict({**sample.to_dict(), **made.trainer_fields()})

`single_turn` and `multi_turn` need `RadixTreeMiddleware` in the router, `agentic` needs `OpenAISessionMiddleware`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np

from miles_router.client.answers import Generation
from miles_router.client.errors import InvalidSample, convert_errors
from miles_router.client.router_client import RouterClient
from miles_router.client.session import Teacher
from miles_router.tasks import together
from miles_router.trajectory import Retrieved, Sample
from miles_router.trajectory.finite import require_finite
from miles_router.trajectory.sample import Reward, Status

Result = TypeVar("Result")
#: Takes the model's text; returns the text to append before the next turn, or None to end the episode.
Environment = Callable[[str], Awaitable[str | None]]
#: An agent, unchanged: it gets only the `base_url` for its OpenAI client.
Agent = Callable[..., Awaitable[Any]]
#: Takes an agent's return value, or the last `Generation` of a text rollout; returns the reward.
Judge = Callable[[Any], Reward | Awaitable[Reward]]


async def single_turn(
    client: RouterClient,
    prompt: str,
    sampling_params: Mapping[str, Any] | None = None,
    *,
    reward: Reward | Judge = None,
    label: Any = None,
    metadata: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Sample:
    """Generate once from a prompt, and return the sample with its exact tokens. Further fields go to `/generate`.

    Args:
        reward: the reward, or a function of the `Generation` that returns it (it may be async). A reward that is a
            number is sent to the router for its dashboard.

    Raises:
        NotFound: the router no longer has the tokens (`max_tokens` of the middleware is too small), or lacks the
            middleware.
        ValueError: reward, label or metadata contain NaN or an infinity.
    """
    require_finite({"reward": None if callable(reward) else reward, "label": label, "metadata": metadata})
    generation = await client.generate(prompt, sampling_params=sampling_params, **fields)
    earned = await _compute_reward(reward, generation)
    exact = await _retrieve_exact(client, prompt, generation, earned)
    carried = {"reward": earned, "label": label, "metadata": {"rid": generation.rid, **(metadata or {})}}
    return _make_sample(exact, prompt, generation.prompt_tokens, generation.status, carried)


async def multi_turn(
    client: RouterClient,
    prompt: str,
    environment: Environment,
    sampling_params: Mapping[str, Any] | None = None,
    *,
    max_turns: int = 16,
    reward: Reward | Judge = None,
    label: Any = None,
    metadata: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Sample:
    """Alternate generations with an environment, tools for example, in one growing text. Return the sample with its
    exact tokens.

    The environment's text is in the tokens with mask 0. If the engine trims the markup that ends the model's turn
    (`<|im_end|>`), that text must begin with it; it must end with the markup that begins the next turn.

    The sample is `completed` when the environment ends the episode, `truncated` when tokens or `max_turns` run out,
    `aborted` when a generation is aborted. All turns go to one worker while it is routable. `reward` works as in
    `single_turn`, on the last generation.

    Raises:
        NotFound: as in `single_turn`.
        ValueError: as in `single_turn`, or `max_turns` is less than 1.
        Exception: any error of the environment.
    """
    if max_turns < 1:
        raise ValueError(f"max_turns must be at least 1, not {max_turns}")
    require_finite({"reward": None if callable(reward) else reward, "label": label, "metadata": metadata})
    key = uuid4().hex
    text, prompt_tokens = prompt, 0
    rids: list[str] = []
    for turn in range(max_turns):
        last = await client.generate(text, sampling_params=sampling_params, routing_key=key, **fields)
        sent, text = text, text + last.text
        prompt_tokens = prompt_tokens or last.prompt_tokens
        rids.append(last.rid)
        status = last.status
        if status != "completed":
            break
        observed = await environment(last.text)
        if observed is None:
            break
        status = "truncated"
        if turn + 1 < max_turns:
            text += observed
    earned = await _compute_reward(reward, last)
    exact = await _retrieve_exact(client, sent, last, earned)
    carried = {"reward": earned, "label": label, "metadata": {"rids": rids, **(metadata or {})}}
    return _make_sample(exact, prompt, prompt_tokens, status, carried)


async def agentic(
    client: RouterClient,
    agent: Agent,
    *,
    session_id: str | None = None,
    max_seq_len: int | None = None,
    branches: str | None = None,
    build: str | None = None,
    mask: str | Sequence[str] | None = None,
    side_calls: bool | None = None,
    reward: Judge | None = None,
    label: Any = None,
    metadata: Mapping[str, Any] | None = None,
    contract: Mapping[str, Any] | None = None,
    teacher: Teacher | None = None,
) -> list[Sample]:
    """Run an agent's episode in a new session, and return its samples, one for each branch.

        async def agent(base_url):
            openai = AsyncOpenAI(base_url=base_url, api_key="none")
            ...
        samples = await agentic(client, agent, reward=lambda outcome: float(outcome == "42"))

    Args:
        max_seq_len, branches, build, mask, side_calls, teacher: as in `Session.collect`.
        contract: the limits of the session (docs/agents.md). With `key` in it the agent is called with `api_key=`
            too.
        reward: a function of the agent's return value that returns the reward of all samples; it may be async.

    Raises:
        InvalidSample: a sample would break an invariant, or no request of the agent was traced; no sample is returned.
        ValueError: reward, label or metadata contain NaN or an infinity.
        Exception: any error of the agent; the session is then deleted. To train on failed episodes, use `Session`.
    """
    require_finite({"label": label, "metadata": metadata})
    async with await client.create_session(session_id, metadata, contract) as session:
        keyed = {} if session.own_key is None else {"api_key": session.own_key}
        outcome = await agent(session.base_url, **keyed)
        earned = await _compute_reward(reward, outcome)
        return await session.collect(
            max_seq_len=max_seq_len,
            branches=branches,
            build=build,
            mask=mask,
            side_calls=side_calls,
            reward=earned,
            label=label,
            metadata=metadata,
            teacher=teacher,
        )


async def group(rollout: Callable[[], Coroutine[Any, Any, Result]], size: int) -> list[Result]:
    """Run `size` rollouts of one prompt at once: `await group(lambda: single_turn(client, prompt, params), 8)`. Return
    their results; the first failure cancels the others and is raised."""
    made: dict[int, Result] = {}

    async def one(index: int) -> None:
        made[index] = await rollout()

    await together([one(index) for index in range(size)], name="rollout")
    return [made[index] for index in range(size)]


async def _compute_reward(reward: Reward | Judge, outcome: Any) -> Reward:
    """Return the reward, computed from the outcome if `reward` is a function.

    Raises:
        ValueError: it contains NaN or an infinity.
    """
    if not callable(reward):
        return reward
    judged = reward(outcome)
    earned = await judged if inspect.isawaitable(judged) else judged
    require_finite({"reward": earned})
    return earned


async def _retrieve_exact(client: RouterClient, prompt: str, generation: Generation, reward: Reward) -> Retrieved:
    """Return the tokens of the whole text up to the end of a generation.

    Raises:
        InvalidSample: the retrieved tokens do not end with the sampled ones.
    """
    whole = prompt + generation.text
    if not generation.output_ids:  # aborted before its first token: only the prompt remains
        return await client.retrieve(whole, strict=False)
    known_reward = float(reward) if isinstance(reward, (int, float)) else None
    exact = await client.retrieve(whole, rid=generation.rid, reward=known_reward)
    sampled = np.asarray(generation.output_ids)
    tail = slice(len(exact) - len(sampled), None)
    if len(exact) < len(sampled) or (exact.tokens[tail] != sampled).any() or not exact.loss_mask[tail].all():
        raise InvalidSample(f"retrieved_as_generated: the tokens of {generation.rid} differ from the sampled ones")
    return exact


def _make_sample(
    exact: Retrieved, prompt: str, prompt_tokens: int, status: Status, carried: Mapping[str, Any]
) -> Sample:
    """Return the sample of a rollout. Its prompt is masked, even tokens in it that an earlier rollout sampled."""
    mask = exact.loss_mask.copy()
    mask[:prompt_tokens] = 0
    if exact.sampling_mask_missing:
        carried = {**carried, "metadata": {**carried["metadata"], "sampling_mask_missing": exact.sampling_mask_missing}}
    with convert_errors("/retrieve_from_text"):
        return Sample(
            tokens=exact.tokens,
            loss_mask=mask,
            logprobs=exact.logprobs,
            weight_versions=tuple(exact.weight_versions),
            sampling_mask=exact.sampling_mask,
            response=exact.text[len(prompt) :],
            response_length=max(len(exact) - prompt_tokens, 0),
            status=status,
            **carried,
        )
