"""The request that carries a generation on from exactly the tokens it has."""

from __future__ import annotations

import orjson

from miles_router.engines.generate import RID
from miles_router.engines.known import USUAL
from miles_router.generation.generation import CannotResume, ResumableGeneration
from miles_router.generation.questions import EngineQuestions

#: Sampling parameters that depend on the output so far but for one value.
PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "beam_width": 1}


async def continuation(generation: ResumableGeneration, questions: EngineQuestions) -> bytes:
    """The body of the request that carries a generation on.

    Raises:
        CannotResume: not exactly.
    """
    answer = generation.answer
    if answer is not None and answer["output_ids"]:  # else it had only queued
        check_stateless(generation)
        await learn_prompt(generation, questions)
    return orjson.dumps({**generation.next_request(), RID: generation.attempt_rid})


def check_stateless(generation: ResumableGeneration) -> None:
    """See that what is sampled depends on the tokens alone.

    Raises:
        CannotResume: it depends on which of them are output, too.
    """
    params, names = generation.params, sorted((generation.facts.engine or USUAL).stateful)
    stateful = [name for name in names if params.get(name) or generation.request.get(name)]
    stateful += [name for name, neutral in PENALTIES.items() if params.get(name) not in (None, neutral)]
    if stateful:
        raise CannotResume(f"{stateful[0]} depends on the output so far")


async def learn_prompt(generation: ResumableGeneration, questions: EngineQuestions) -> None:
    """Know the ids of the prompt: given, or as the worker's own tokenizer says.

    Raises:
        CannotResume: that is not the prompt the generation had.
    """
    if generation.prompt:
        return
    ids, meta = (
        generation.request.get("input_ids"),
        generation.answer["meta_info"] if generation.answer is not None else {},
    )
    tokens = list(ids) if ids is not None else await questions.tokenize(generation.request["text"])
    counted = meta.setdefault("prompt_tokens", len(tokens))  # one that was aborted in the queue does not say
    if ids is None and len(tokens) != counted:
        raise CannotResume("the worker's tokenizer does not give the prompt it had")
    generation.prompt = tokens
