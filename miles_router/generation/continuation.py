"""The request that continues a generation from exactly its sampled tokens."""

from __future__ import annotations

import orjson

from miles_router.engines.generate import RID
from miles_router.engines.known import USUAL
from miles_router.generation.generation import CannotResume, ResumableGeneration
from miles_router.generation.questions import EngineQuestions

#: Sampling parameters that depend on the earlier output, with the value that does not.
PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "beam_width": 1}


async def continuation(generation: ResumableGeneration, questions: EngineQuestions) -> bytes:
    """Return the body of the request that continues a generation.

    Raises:
        CannotResume: the generation cannot be continued exactly.
    """
    answer = generation.answer
    if answer is not None and answer["output_ids"]:  # otherwise it was still in the queue
        check_stateless(generation)
        await learn_prompt(generation, questions)
    return orjson.dumps({**generation.next_request(), RID: generation.attempt_rid})


def check_stateless(generation: ResumableGeneration) -> None:
    """Check that sampling depends on the tokens alone, and not on which of them are output.

    Raises:
        CannotResume: a parameter of the request makes it depend on the output.
    """
    params, names = generation.params, sorted((generation.facts.engine or USUAL).stateful)
    stateful = [name for name in names if params.get(name) or generation.request.get(name)]
    stateful += [name for name, neutral in PENALTIES.items() if params.get(name) not in (None, neutral)]
    if stateful:
        raise CannotResume(f"{stateful[0]} depends on the output so far")


async def learn_prompt(generation: ResumableGeneration, questions: EngineQuestions) -> None:
    """Set `generation.prompt` to the prompt ids, from the request or from the worker's tokenizer.

    Raises:
        CannotResume: the number of ids differs from the prompt length that the worker reported.
    """
    if generation.prompt:
        return
    ids, meta = (
        generation.request.get("input_ids"),
        generation.answer["meta_info"] if generation.answer is not None else {},
    )
    tokens = list(ids) if ids is not None else await questions.tokenize(generation.request["text"])
    counted = meta.setdefault("prompt_tokens", len(tokens))  # an abort in the queue does not report it
    if ids is None and len(tokens) != counted:
        raise CannotResume("the worker's tokenizer returns another number of prompt tokens than the generation had")
    generation.prompt = tokens
