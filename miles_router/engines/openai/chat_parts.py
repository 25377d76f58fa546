"""Chat answers that are sampled in several attempts: the request for the rest, and the joining of all parts. Pure.

Source: SGLang 0.5.23, `serving_chat.py`. Parsers must see a whole answer. So the request for the rest turns parsers
off and has the prompt ids with the sampled ids as input: the engine then returns the text that its own answer would
continue with. Between attempts an answer has the form of `/generate`, in which parts are joined (`generation/`).
The third element of each logprob triple is then chat's logprob entry.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from miles_router.engines.answers import LOGPROBS, MALFORMED, VERSION, VERSIONS, UnreadableAnswer, in_words
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat import tools_of

#: Request fields that turn parsing off.
RAW = {"separate_reasoning": False, "tool_choice": "none"}
DROPPED_FIELDS = (
    *("stream", "stream_options", "n", "max_completion_tokens", "continue_final_message"),
    *(
        "return_prompt_token_ids",
        "return_token_ids",
        "return_meta_info",
        "return_input_ids_in_sglext",
        "return_output_ids_in_sglext",
    ),
)
#: Reasoning parsers for which the engine keeps special tokens in the text.
KEEP_SPECIAL = frozenset({"apertus2509", "kimi_k3", "inkling", "muse", "gpt-oss", "gemma4", "mistral"})
#: Parsers of tool calls for which the engine constrains the sampling of every turn with tools.
CONSTRAINED = frozenset({"glm47", "response_template", "inkling", "kimi_k3"})
#: Sampling parameters with the same name in `/generate` that `generation/` reads.
PARAMS = (
    *("regex", "ebnf", "structural_tag", "stop_regex", "custom_params", "watermark", "stop", "stop_token_ids"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos", "no_stop_trim"),
)


def looks_for_calls(fields: Mapping[str, Any], facts: Facts) -> bool:
    """Return True if the engine parses tool calls in the answer."""
    return bool(facts.tool_call_parser and tools_of(fields))


def separates_reasoning(fields: Mapping[str, Any], facts: Facts) -> bool:
    """Return True if the engine separates reasoning from the answer."""
    return bool(facts.reasoning_parser and fields.get("separate_reasoning", True))


def keeps_special(fields: Mapping[str, Any], facts: Facts) -> bool:
    """Return True if the text for the engine's parsers contains special tokens."""
    return (
        bool(tools_of(fields)) or facts.reasoning_parser in KEEP_SPECIAL or fields.get("skip_special_tokens") is False
    )


def call_id(name: str, place: int, fields: Mapping[str, Any], facts: Facts) -> str:
    """Return an id for a call, in the engine's form (SGLang 0.5.23, `_process_tool_call_id`).

    Kimi K2's template reads the ids: they number the calls of the whole conversation. All other ids are random.
    """
    if facts.tool_call_parser != "kimi_k2":
        return f"call_{uuid.uuid4().hex[:24]}"
    before = sum(len(message.get("tool_calls") or ()) for message in fields["messages"])
    return f"functions.{name}:{before + place}"


def constraint_of(fields: Mapping[str, Any], facts: Facts) -> str | None:
    """Return the constraint on the form of the answer, which rules out a separate request for the rest; or None."""
    if (fields.get("response_format") or {"type": "text"}).get("type") != "text":
        return "response_format"
    tools = tools_of(fields)
    if not tools:
        return None
    if fields.get("tool_choice") not in (None, "auto"):
        return "tool_choice"
    if any((tool.get("function") or {}).get("strict") for tool in tools if isinstance(tool, Mapping)):
        return "a strict tool"
    return "the engine's parser of tool calls" if facts.tool_call_parser in CONSTRAINED else None


def as_generation(fields: Mapping[str, Any], prompt: Sequence[int], facts: Facts) -> dict[str, Any]:
    """Return a chat request for one choice in the form of `/generate`, as far as a continuation needs it."""
    params = {name: fields[name] for name in PARAMS if fields.get(name) is not None}
    params["max_new_tokens"] = fields.get("max_completion_tokens") or fields.get("max_tokens")
    params["min_new_tokens"] = fields.get("min_tokens") or 0
    params["skip_special_tokens"] = not keeps_special(fields, facts)
    kept = {name: value for name, value in fields.items() if name not in ("messages", "tools", "stream", "n")}
    return {**kept, "input_ids": list(prompt), "sampling_params": params, "return_logprob": True}


def rest_request(
    fields: Mapping[str, Any],
    ids: Sequence[int],
    params: Mapping[str, Any],
    rows: Mapping[str, Any],
    *,
    stream: bool,
) -> dict[str, Any]:
    """Return the request for the rest of a choice, with parsers off.

    Args:
        ids: the prompt and the tokens sampled so far.
        params: sampling parameters with the remaining token budget.
        rows: the fields that ask for rows.
    """
    sent = {name: value for name, value in fields.items() if name not in DROPPED_FIELDS}
    sent |= {**RAW, **rows, "input_ids": list(ids), "logprobs": True}
    sent |= {"stream": True, "return_output_ids_in_sglext": True} if stream else {"return_meta_info": True}
    sent |= {"max_tokens": params["max_new_tokens"], "min_tokens": params["min_new_tokens"]}
    return {**sent, "skip_special_tokens": params["skip_special_tokens"]}


def choice_as_generate(choice: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a choice of a whole answer in the form of `/generate`.

    Raises:
        UnreadableAnswer: a field is missing, or the counts of tokens and logprobs differ.
    """
    try:
        meta, entries = choice["meta_info"], choice["logprobs"]["content"]
        triples = meta[LOGPROBS]
        if len(entries) != len(triples):
            raise UnreadableAnswer("token_counts_disagree", f"{len(triples)} tokens, {len(entries)} logprobs")
        marked = [[triple[0], triple[1], entry] for triple, entry in zip(triples, entries, strict=True)]
        ids = [triple[1] for triple in triples]
    except MALFORMED as error:
        raise UnreadableAnswer("incomplete", in_words(error)) from error
    return {"text": text, "output_ids": ids, "meta_info": {**meta, LOGPROBS: marked}}


def rest_as_generate(answer: Any) -> dict[str, Any]:
    """Return the whole answer to a `rest_request` in the form of `/generate`.

    Raises:
        UnreadableAnswer: the answer does not have exactly one choice, or a field is missing.
    """
    try:
        (choice,) = answer["choices"]
        return choice_as_generate(choice, choice["message"]["content"] or "")
    except (*MALFORMED, ValueError) as error:
        raise (
            error if isinstance(error, UnreadableAnswer) else UnreadableAnswer("incomplete", in_words(error))
        ) from error


def entries_of(answer: Mapping[str, Any]) -> list[Any]:
    """Return chat's logprob entries of a joined answer."""
    return [triple[2] for triple in answer["meta_info"][LOGPROBS]]


def finish_reason_of(answer: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the finish reason of a joined answer: `tool_calls` in place of `stop` if the message has calls."""
    finish = answer["meta_info"]["finish_reason"]
    if message.get("tool_calls") and finish["type"] == "stop":
        return {**finish, "type": "tool_calls", "matched": None}
    return dict(finish)


def joined_choice(first: Mapping[str, Any], answer: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choice of a joined answer; `first` is the choice of the first attempt."""
    finish, entries = finish_reason_of(answer, message), entries_of(answer)
    triples = [
        [triple[0], triple[1], entry.get("token")]
        for triple, entry in zip(answer["meta_info"][LOGPROBS], entries, strict=True)
    ]
    choice = {
        **first,
        "message": message,
        "logprobs": {"content": entries},
        "finish_reason": finish["type"],
        "matched_stop": finish.get("matched"),
        "meta_info": {**answer["meta_info"], LOGPROBS: triples, "finish_reason": finish},
    }
    if "response_token_ids" in first:
        choice["response_token_ids"] = answer["output_ids"]
    return choice


def joined_answer(first: Mapping[str, Any], choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the whole answer with these choices; `first` is the answer of the first attempt, which was cut."""
    metas = [choice["meta_info"] for choice in choices]
    answer = {**first, "choices": list(choices), "usage": joined_usage(first.get("usage"), metas)}
    if "metadata" in first:
        versions = {name: metas[0][name] for name in (VERSION, VERSIONS) if name in metas[0]}
        answer["metadata"] = {**(first["metadata"] or {}), **versions}
    extra = first.get("sglext")
    if extra and extra.get("output_ids"):
        ids = [[triple[1] for triple in meta[LOGPROBS]] for meta in metas]
        answer["sglext"] = {**extra, "output_ids": ids}
    return answer


def joined_usage(first: Any, metas: Sequence[Mapping[str, Any]]) -> Any:
    """Return the usage of a joined answer; `first` is the usage of the first attempt, whose prompt counts stay.

    SGLang 0.5.23 reports 0 prompt tokens for a choice that it aborts in its queue. A later attempt has the count.
    """
    if not isinstance(first, Mapping):
        return first
    completion = sum(meta["completion_tokens"] for meta in metas)
    prompt = first.get("prompt_tokens") or max((meta.get("prompt_tokens") or 0 for meta in metas), default=0)
    usage = {**first, "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    if first.get("reasoning_tokens"):
        reasoning = sum(meta.get("reasoning_tokens") or 0 for meta in metas)
        usage["reasoning_tokens"] = reasoning
        if isinstance(first.get("completion_tokens_details"), Mapping):
            details = {**first["completion_tokens_details"], "reasoning_tokens": reasoning}
            usage["completion_tokens_details"] = details
    return usage


def with_reasoning_tokens(answer: Mapping[str, Any], end: str) -> dict[str, Any]:
    """Set `reasoning_tokens` of a joined answer: the number of tokens up to and with `end`, or of all without `end`.

    The engine's own count is wrong: for a later attempt, earlier tokens are part of the prompt.
    """
    tokens = [entry.get("token") for entry in entries_of(answer)]
    count = tokens.index(end) + 1 if end in tokens else len(tokens)
    return {**answer, "meta_info": {**answer["meta_info"], "reasoning_tokens": count}}
