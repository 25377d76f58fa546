"""Arguments that are no JSON and come back repaired are the held ones; any other change is an edit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from middleware_hub.openai_session.sessions.repaired import is_repair

REPAIRED: list[tuple[str, Any]] = [
    ('{"a": 17, "b": 25', {"a": 17, "b": 25}),
    ('{"a": 17, "b": 25\n', {"a": 17, "b": 25}),
    ('{"a": 17, "b": 2', {"a": 17}),
    ('{"a": 17, "b":', {"a": 17}),
    ('{"a": 17, "b":', {"a": 17, "b": None}),
    ('{"a": 17, "b": 25}}', {"a": 17, "b": 25}),
    ('{"a": 17, "b": 25,}', {"a": 17, "b": 25}),
    ('{"a": [1, {"b": "x"', {"a": [1, {"b": "x"}]}),
    ('{"path": "/tmp/a", "text": "one\\ntw', {"path": "/tmp/a", "text": "one\ntw"}),
    ('{"text": "one\ntwo"}', {"text": "one\ntwo"}),
    ('{"text": "caf\\u00e', {"text": "caf"}),
    ('{"text": "a\\', {"text": "a"}),
    ("{'a': True, 'b': None}", {"a": True, "b": None}),
    ("{a: 1, b: 2}", {"a": 1, "b": 2}),
    ('{"a": 1.0, "b": 25', {"a": 1, "b": 25}),
    ('{"a": 17, "b": 25', {}),
    ('{"a": 17, "b": 25', {"INVALID_JSON": '{"a": 17, "b": 25'}),
]
EDITS: list[tuple[Any, Any]] = [
    ('{"a": 17, "b": 25', {"a": 17, "b": 26}),
    ('{"a": 17, "b": 25', {"b": 25, "a": 17}),
    ('{"a": 17, "b": 25', {"a": 17, "b": 25, "c": 1}),
    ('{"path": "/etc/passwd", "b": 2', {"path": "/etc"}),
    ('{"a": 17, "b": 25}', {"a": 17}),
    ('{"a": 17, "b": 25}', {}),
    ('{"a": "', 7),
    ('{"a": "', "text"),
    ("", {"a": 1}),
    (None, {"a": 1}),
    ({"a": 1}, {"a": 2}),
]


@pytest.mark.parametrize(("held", "sent"), REPAIRED)
@pytest.mark.parametrize("as_text", [False, True])
def test_a_repair_is_the_held_call(held: str, sent: Any, as_text: bool) -> None:
    assert is_repair(held, json.dumps(sent) if as_text else sent)


@pytest.mark.parametrize(("held", "sent"), EDITS)
def test_any_other_change_is_an_edit(held: Any, sent: Any) -> None:
    assert not is_repair(held, sent)
    assert not is_repair(held, json.dumps(sent))
