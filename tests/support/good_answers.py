"""Answers with calls that nothing is wrong with, in the formats of the engine's parsers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

TEXT = "print(\"a\\n<b>\", C:\\new) & 'q' — 世界\n  if a < b and c > d:\n"
ARGUMENTS: dict[str, Any] = {
    "path": "ä 1.50.txt",
    "text": TEXT,
    "lines": ["x\n", "y"],
    "count": 7,
    "ratio": 2.50,
    "exact": True,
    "options": {"k": None},
}
TYPES = {
    **{"path": "string", "text": "string", "lines": "array", "count": "integer", "ratio": "number"},
    **{"exact": "boolean", "options": "object"},
}
PARAMETERS = {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "write_file", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_date", "parameters": {"type": "object", "properties": {}}}},
]
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (("write_file", ARGUMENTS), ("get_date", {}))
SAID = "I'll write it, with 3 lines."


class GoodAnswer(NamedTuple):
    """An answer, for one of the engine's parsers of calls."""

    parser: str
    text: str


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tags(call: str, parameter: str, calls: Any = CALLS) -> str:
    """Calls by templates of `{name}` and `{body}`, and of `{key}`, `{value}` and `{kind}`."""
    return "".join(
        call.format(
            name=name,
            body="".join(
                parameter.format(key=key, value=_raw(value), kind="true" if isinstance(value, str) else "false")
                for key, value in arguments.items()
            ),
        )
        for name, arguments in calls
    )


def _json(call: str, *, between: str = "", calls: Any = CALLS, **dump: Any) -> str:
    """Calls by a template of `{name}` and `{arguments}`."""
    return between.join(
        call.replace("{name}", name)
        .replace("{place}", str(place))
        .replace("{arguments}", json.dumps(arguments, ensure_ascii=False, **dump))
        for place, (name, arguments) in enumerate(calls)
    )


_NAMED = '{"name": "{name}", "arguments": {arguments}}'
_ARG = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
_DSML = '<｜{0}｜{1}parameter name="{{key}}" string="{{kind}}">{{value}}</｜{0}｜{1}parameter>\n'
_CODER = "<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>\n"
_CODER_ARG = "<parameter={key}>\n{value}\n</parameter>\n"


def _dsml(name: str, section: str, space: str = "") -> str:
    call = f'<｜{name}｜{space}invoke name="{{name}}">\n{{body}}</｜{name}｜{space}invoke>\n'
    calls = _tags(call, _DSML.format(name, space))
    return f"\n\n<｜{name}｜{space}{section}>\n{calls}</｜{name}｜{space}{section}>"


def _python(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def _written() -> Iterator[tuple[str, str]]:
    hermes = _json(f"\n<tool_call>\n{_NAMED}\n</tool_call>")
    for parser in ("qwen25", "hermes", "trinity"):
        yield parser, hermes
    yield "qwen25", _json(f"\n<tool_call>\n{_NAMED}\n</tool_call>", separators=(",", ":"))
    for parser in ("qwen3_coder", "step3p5", "nanbeige"):
        yield parser, _tags(_CODER, _CODER_ARG)
    yield "mimo", _tags(_CODER, "<parameter={key}>{value}</parameter>\n")
    for parser in ("glm45", "ling3", "poolside_v1"):
        yield parser, _tags("\n<tool_call>{name}\n{body}</tool_call>", _ARG)
    yield "glm47", _tags("<tool_call>{name}{body}</tool_call>", _ARG.replace("\n", ""))
    yield "spark25", _tags("<tool_call>{name}\n{body}</tool_call>", _ARG.replace(">\n<", "><"))
    yield "iquest_q1", _tags("<iquest_tool_call>{name}\n{body}</iquest_tool_call>", _ARG)
    hunyuan = _tags("<tool_call>{name}<tool_sep>\n{body}</tool_call>\n", _ARG)
    yield "hunyuan", f"<tool_calls>\n{hunyuan}</tool_calls>"
    kimi = _json("<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>")
    yield "kimi_k2", f"<|tool_calls_section_begin|>{kimi}<|tool_calls_section_end|>"
    invokes = _tags('<invoke name="{name}">\n{body}</invoke>\n', '<parameter name="{key}">{value}</parameter>\n')
    yield "minimax-m2", f"\n<minimax:tool_call>\n{invokes}</minimax:tool_call>"
    yield "dots", f"\n<dots_function_call>\n{invokes}</dots_function_call>"
    marks = _json("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
    yield "deepseekv31", f"<｜tool▁calls▁begin｜>{marks}<｜tool▁calls▁end｜>"
    fenced = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
    yield "deepseekv3", f"<｜tool▁calls▁begin｜>{_json(fenced, between=chr(10))}<｜tool▁calls▁end｜>"
    yield "deepseekv32", _dsml("DSML", "function_calls")
    yield "deepseekv41", _dsml("DSML", "calls", " ")
    yield "gigachat35", _dsml("GCML", "tool_calls")
    yield "gigachat3", "<|message_sep|>\n\nfunction call<|role_sep|>\n" + _json(_NAMED, calls=CALLS[:1])
    yield (
        "gpt-oss",
        _json(
            "<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            "{arguments}<|call|>"
        ),
    )
    yield "interns1", _json('<|action_start|> <|plugin|>\n{"name": "{name}", "parameters": {arguments}}<|action_end|>')
    yield "llama3", "<|python_tag|>" + _json('{"name": "{name}", "parameters": {arguments}}', between=";")
    yield "mistral", f"[TOOL_CALLS] [{_json(_NAMED, between=', ')}]"
    yield "mistral", _json("[TOOL_CALLS]{name}[ARGS]{arguments}")
    yield (
        "lfm2",
        "<|tool_call_start|>[{}]<|tool_call_end|>".format(
            ", ".join(f"{name}({_python(arguments)})" for name, arguments in CALLS)
        ),
    )
    yield "pythonic", "[{}]".format(", ".join(f"{name}({_python(arguments)})" for name, arguments in CALLS))
    cohere = _json('{"tool_call_id": "{place}", "tool_name": "{name}", "parameters": {arguments}}', between=",\n")
    yield "cohere_command4", f"<|START_ACTION|>[\n{cohere}\n]<|END_ACTION|>"
    apertus = _json('{"{name}": {arguments}}', between=", ")
    yield "apertus2509", f"<|tools_prefix|>[{apertus}]<|tools_suffix|>"
    steps = _tags(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{body}</steptml:invoke>'
        "<｜tool_call_end｜>\n",
        '<steptml:parameter name="{key}">{value}</steptml:parameter>',
    )
    yield "step3", f"<｜tool_calls_begin｜>\n{steps}<｜tool_calls_end｜>"
    yield (
        "k2_horizon",
        "<ifm|tool_calls>{}</ifm|tool_calls>".format(
            _tags("<ifm|tool_call>{name}\n{body}</ifm|tool_call>", _ARG.replace("arg_", "ifm|arg_"))
        ),
    )
    yield (
        "minicpm5",
        _tags('<function name="{name}">{body}</function>', '<param name="{key}"><![CDATA[{value}]]></param>'),
    )
    m3 = _tags('@<invoke name="{name}">{body}@</invoke>', "@<{key}>{value}@</{key}>", CALLS[:1])
    m3 = m3.replace(json.dumps(ARGUMENTS["lines"]), "@<item>x@</item>@<item>y@</item>")
    m3 = m3.replace(json.dumps(ARGUMENTS["options"]), "@<k>null@</k>")
    yield "minimax-m3", f"@<tool_call>{m3}@</tool_call>".replace("@", "]<]minimax[>[")
    kimi3 = "".join(
        f'<|open|>call tool="{name}" index="{place}"<|sep|>'
        + "".join(
            f'<|open|>argument key="{key}" type="{TYPES[key]}"<|sep|>{_raw(value)}<|close|>argument<|sep|>'
            for key, value in arguments.items()
        )
        + "<|close|>call<|sep|>"
        for place, (name, arguments) in enumerate(CALLS, 1)
    )
    yield "kimi_k3", f"<|open|>tools<|sep|>{kimi3}<|close|>tools<|sep|>"
    yield (
        "inkling",
        "".join(
            f'<|message_model|>{name}<|content_invoke_tool_json|>{{"name":"{name}","args":{json.dumps(arguments)}}}'
            "<|end_message|>"
            for name, arguments in CALLS
        ),
    )
    gemma = ",".join(
        f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{json.dumps(value)}"
        for key, value in ARGUMENTS.items()
        if key not in ("lines", "options")
    )
    yield "gemma4", f"<|tool_call>call:write_file{{{gemma}}}<tool_call|><|tool_call>call:get_date{{}}<tool_call|>"


#: Those whose parser takes no text beside calls.
_CALLS_ALONE = ("kimi_k3", "inkling", "pythonic")
GOOD_ANSWERS = [GoodAnswer(parser, text if parser in _CALLS_ALONE else SAID + text) for parser, text in _written()]
