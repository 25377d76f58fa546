"""A chat answer that several requests sample one after the other: the request that carries it on, and what came of it
all (SGLang 0.5.23, `serving_chat.py`). Pure.

Parsers must see an answer whole. So the rest of one is asked for raw, with parsers off, as ids behind the ids that
there are: then its text is what the engine's own text would go on with. In between an answer has the form of
`/generate`, in which parts are joined (`partial_rollouts`); the third element of each logprob is chat's entry for it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from miles_router.engines.answers import LOGPROBS, MALFORMED, VERSION, VERSIONS, UnreadableAnswer, in_words
from miles_router.engines.facts import Facts

#: What asks for the text as it was sampled.
RAW = {"separate_reasoning": False, "tool_choice": "none"}
OF_OTHER_ATTEMPTS = (
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
#: Sampling parameters of the same name, whose values `partial_rollouts` looks at.
PARAMS = (
    *("regex", "ebnf", "structural_tag", "stop_regex", "custom_params", "watermark", "stop", "stop_token_ids"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos", "no_stop_trim"),
)


def tools_of(fields: Mapping[str, Any]) -> list[Any]:
    """The tools whose calls the engine looks for in the answer."""
    tools = fields.get("tools")
    return tools if isinstance(tools, list) and fields.get("tool_choice") != "none" else []


def looks_for_calls(fields: Mapping[str, Any], facts: Facts) -> bool:
    """Whether the engine takes tool calls out of the answer."""
    return bool(facts.tool_call_parser and tools_of(fields))


def separates_reasoning(fields: Mapping[str, Any], facts: Facts) -> bool:
    """Whether the engine takes reasoning out of the answer."""
    return bool(facts.reasoning_parser and fields.get("separate_reasoning", True))


def keeps_special(fields: Mapping[str, Any], facts: Facts) -> bool:
    """Whether the text that the engine's parsers read has special tokens."""
    return (
        bool(tools_of(fields)) or facts.reasoning_parser in KEEP_SPECIAL or fields.get("skip_special_tokens") is False
    )


def call_id(name: str, place: int, fields: Mapping[str, Any], facts: Facts) -> str:
    """As the engine names a call (SGLang 0.5.23, `_process_tool_call_id`): Kimi K2's template reads the names."""
    if facts.tool_call_parser != "kimi_k2":
        return f"call_{uuid.uuid4().hex[:24]}"
    before = sum(len(message.get("tool_calls") or ()) for message in fields["messages"])
    return f"functions.{name}:{before + place}"


def constraint_of(fields: Mapping[str, Any], facts: Facts) -> str | None:
    """What binds the whole answer to a form, so that a part of it cannot be sampled alone; None if nothing."""
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
    """A request of `/generate` for one choice, with what matters for carrying it on."""
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
    """The request for the rest of a choice, raw: behind these ids, with what is left of its budget."""
    sent = {name: value for name, value in fields.items() if name not in OF_OTHER_ATTEMPTS}
    sent |= {**RAW, **rows, "input_ids": list(ids), "logprobs": True}
    sent |= {"stream": True, "return_output_ids_in_sglext": True} if stream else {"return_meta_info": True}
    sent |= {"max_tokens": params["max_new_tokens"], "min_tokens": params["min_new_tokens"]}
    return {**sent, "skip_special_tokens": params["skip_special_tokens"]}


def part_of(choice: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A choice of a whole answer in the form of `/generate`.

    Raises:
        UnreadableAnswer: it lacks something.
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


def rest_of(answer: Any) -> dict[str, Any]:
    """The whole answer to a `rest_request` in the form of `/generate`.

    Raises:
        UnreadableAnswer: it is none.
    """
    try:
        (choice,) = answer["choices"]
        return part_of(choice, choice["message"]["content"] or "")
    except (*MALFORMED, ValueError) as error:
        raise (
            error if isinstance(error, UnreadableAnswer) else UnreadableAnswer("incomplete", in_words(error))
        ) from error


def entries_of(answer: Mapping[str, Any]) -> list[Any]:
    """Chat's entries for the logprobs of a joined answer."""
    return [triple[2] for triple in answer["meta_info"][LOGPROBS]]


def finished(answer: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    """Why a joined answer ended, as chat says it: a stop behind a tool call is one of `tool_calls`."""
    finish = answer["meta_info"]["finish_reason"]
    if message.get("tool_calls") and finish["type"] == "stop":
        return {**finish, "type": "tool_calls", "matched": None}
    return dict(finish)


def joined_choice(first: Mapping[str, Any], answer: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    """The choice of a whole answer that all of it makes; `first` is how it began."""
    finish, entries = finished(answer, message), entries_of(answer)
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
    """The whole answer that these choices make; `first` is the one that was cut."""
    metas = [choice["meta_info"] for choice in choices]
    answer = {**first, "choices": list(choices), "usage": joined_usage(first.get("usage"), metas)}
    if "metadata" in first:
        told = {name: metas[0][name] for name in (VERSION, VERSIONS) if name in metas[0]}
        answer["metadata"] = {**(first["metadata"] or {}), **told}
    extra = first.get("sglext")
    if extra and extra.get("output_ids"):
        ids = [[triple[1] for triple in meta[LOGPROBS]] for meta in metas]
        answer["sglext"] = {**extra, "output_ids": ids}
    return answer


def joined_usage(first: Any, metas: Sequence[Mapping[str, Any]]) -> Any:
    """Return the usage of an answer whose first part told `first`; what that says of the prompt stays.

    SGLang 0.5.23 tells of a choice that it aborts in its queue no prompt, and counts 0: the part behind it tells.
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
    """A joined answer with the number of its tokens up to the one that ends reasoning: an engine that is given the
    first of them as its prompt counts others."""
    tokens = [entry.get("token") for entry in entries_of(answer)]
    count = tokens.index(end) + 1 if end in tokens else len(tokens)
    return {**answer, "meta_info": {**answer["meta_info"], "reasoning_tokens": count}}
