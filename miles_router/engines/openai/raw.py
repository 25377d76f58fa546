"""Requests after a failure of the engine's parser: the session asks again for raw text and parses it itself. Pure.

Source: SGLang 0.5.23, `serving_chat.py`. A model may write half of a surrogate pair as an escape in the arguments of a
call. SGLang's parser decodes it to a string that cannot be encoded as JSON. SGLang answers 500, and the sampled tokens
are lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from miles_router.engines.answers import ASKS_FOR_MASK, MALFORMED, UnreadableAnswer, in_words
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat import PROMPT_OF_WHOLE
from miles_router.engines.openai.chat_parts import constraint_of, looks_for_calls
from miles_router.engines.openai.text_reader import TextReader
from miles_router.engines.parsers import Parsers

#: The HTTP status if the engine's parser fails.
PARSER_FAILED = 500


def can_parse_locally(fields: Mapping[str, Any], parsers: Parsers, facts: Facts) -> bool:
    """Return True if the session can parse the answer, of one choice, itself."""
    reads = looks_for_calls(fields, facts) and TextReader(fields, parsers, facts).missing is None
    return reads and constraint_of(fields, facts) is None


def prompt_request(fields: Mapping[str, Any]) -> bytes:
    """Return a request for the ids of the prompt. It samples one token, so that no parser fails, and asks for no
    sampling mask, which SGLang refuses without `return_meta_info`."""
    left_out = ("stream", "stream_options", "max_completion_tokens", "min_tokens", "rid", ASKS_FOR_MASK)
    sent = {name: value for name, value in fields.items() if name not in left_out}
    return orjson.dumps({**sent, "max_tokens": 1, PROMPT_OF_WHOLE: True})


def prompt_of(answer: Any) -> list[int]:
    """Return the ids of the prompt in the answer to `prompt_request`.

    Raises:
        UnreadableAnswer: the answer has none.
    """
    try:
        ids = answer["choices"][0][PROMPT_OF_WHOLE.removeprefix("return_")]
    except MALFORMED as error:
        raise UnreadableAnswer("incomplete", in_words(error)) from error
    if not isinstance(ids, list) or not ids:
        raise UnreadableAnswer("incomplete", "the ids of the prompt are missing")
    return ids
