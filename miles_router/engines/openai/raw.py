"""A chat answer that the engine cannot write, asked for as raw text and read here (SGLang 0.5.23, `serving_chat.py`).
Pure.

A model may write half of a surrogate pair as an escape into the arguments of a call. The engine's parser makes a text
of it that no JSON can hold, and answers 500 with all that was sampled lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from miles_router.engines.answers import MALFORMED, UnreadableAnswer, in_words
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat import PROMPT_OF_WHOLE
from miles_router.engines.openai.legs import as_generation, constraint_of, looks_for_calls, rest_request
from miles_router.engines.openai.text_reader import TextReader
from miles_router.engines.parsers import Parsers, reasoning_marks

#: What an engine answers with then.
STATUS = 500


def may_be_raw(fields: Mapping[str, Any], parsers: Parsers, facts: Facts) -> bool:
    """Return whether an answer of one choice can be asked for raw, and read here."""
    reads = looks_for_calls(fields, facts) and TextReader(fields, parsers, facts).missing is None
    return reads and constraint_of(fields, facts) is None


def prompt_request(fields: Mapping[str, Any]) -> bytes:
    """Return a request that tells the ids of the prompt; one token cannot fail."""
    left_out = ("stream", "stream_options", "max_completion_tokens", "min_tokens", "rid")
    sent = {name: value for name, value in fields.items() if name not in left_out}
    return orjson.dumps({**sent, "max_tokens": 1, PROMPT_OF_WHOLE: True})


def prompt_of(answer: Any) -> list[int]:
    """Return the ids of a prompt.

    Raises:
        UnreadableAnswer: the answer does not tell them.
    """
    try:
        ids = answer["choices"][0][PROMPT_OF_WHOLE.removeprefix("return_")]
    except MALFORMED as error:
        raise UnreadableAnswer("incomplete", in_words(error)) from error
    if not isinstance(ids, list) or not ids:
        raise UnreadableAnswer("incomplete", "the prompt's ids are not told")
    return ids


def raw_request(fields: Mapping[str, Any], prompt: Sequence[int], facts: Facts) -> bytes:
    """Return the request for the text as it is sampled behind these ids."""
    params = as_generation(fields, (), facts)["sampling_params"]
    sent = rest_request(fields, prompt, params, {}, stream=False)
    return orjson.dumps({name: value for name, value in sent.items() if value is not None})


def read_raw(
    answer: Any, fields: Mapping[str, Any], prompt: Sequence[int], parsers: Parsers, facts: Facts
) -> dict[str, Any]:
    """Return a raw answer as the engine would have given it.

    Raises:
        UnreadableAnswer: it cannot be read.
    """
    try:
        (choice,) = answer["choices"]
        began, finish = choice["message"], choice["finish_reason"]
        text, (begin, end) = began["content"] or "", reasoning_marks(facts.reasoning_parser or "")
        opened = end in text and begin not in text
        message = TextReader(fields, parsers, facts).read(text, began, opened=opened).message
        meta = choice["meta_info"]
    except UnreadableAnswer:
        raise
    except (*MALFORMED, ValueError) as error:
        raise UnreadableAnswer("incomplete", in_words(error)) from error
    if message.get("tool_calls") and finish == "stop":
        finish, meta = "tool_calls", {**meta, "finish_reason": {**meta["finish_reason"], "matched": None}}
    read = {**choice, "message": message, "finish_reason": finish, "meta_info": meta}
    return {**answer, "choices": [{**read, "prompt_token_ids": list(prompt)}]}
