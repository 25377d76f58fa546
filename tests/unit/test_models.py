"""The model that a request names, found without parsing; and adapters as each route reads them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.engines.engine import CannotServe
from miles_router.engines.models import adapter_of, model_of, with_model
from miles_router.engines.sglang.adapters import listed_adapters, with_adapter


def never(body: bytes) -> Any:
    raise AssertionError("it is parsed")


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b"", None),
        (b'{"text": "no such field"}', None),
        (b'\n { "model":"a"}', "a"),
        (b'{"messages": [], "model": "a/b:c \\u00e4"}', "a/b:c ä"),
        (b'{"text": "\\"model\\": 1"}', None),
        (b'{"model": 7}', 7),
    ],
)
def test_a_model_that_stands_first_or_last_is_found_without_parsing(body: bytes, model: object) -> None:
    assert model_of(body, never) == model


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model": "a", "tools": [{"model": {}}]}', "a"),
        (b'{"model": "a", "text": "x", "model": "b"}', "b"),
        (b'{"model": null, "text": "x", "model": "b"}', "b"),
        (b'{"mod\\u0065l": "b"}', "b"),
        (b'{"model": "a", "mod\\u0065l": "b", "x": 1}', "b"),
    ],
)
def test_one_that_is_named_twice_or_with_escapes_is_what_a_parser_finds(body: bytes, model: object) -> None:
    assert model_of(body, orjson.loads) == orjson.loads(body)["model"] == model


@pytest.mark.parametrize(
    ("own", "written"),
    [
        (None, "x"),
        ("", "x"),
        ([], "x"),
        ("y", "y"),
        (["y", "y"], ["y", "y"]),
        ([None, "y"], ["x", "y"]),
        ([None, ""], ["x", "x"]),
    ],
)
def test_prompts_that_name_no_adapter_have_the_request_s(own: object, written: object) -> None:
    body = orjson.dumps({"text": "a", "lora_path": own, "model": "m:x"})
    assert orjson.loads(with_adapter("/generate", body, "x", orjson.loads))["lora_path"] == written


values = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(st.lists(st.tuples(st.sampled_from(["model", "a", "b", "c"]), values)), st.sampled_from(["", "\n  "]))
def test_it_is_what_a_parser_finds(fields: list[tuple[str, Any]], space: str) -> None:
    body = f"{space}{{{space}".encode() + b", ".join(
        orjson.dumps(name) + b": " + orjson.dumps(value) for name, value in dict(fields).items()
    )
    body += b"}"
    assert model_of(body, orjson.loads) == orjson.loads(body).get("model")


@pytest.mark.parametrize(
    ("model", "names", "found"),
    [
        ("a:x", ["a", "b"], ("a", "x")),
        ("a:b:x", ["a", "a:b"], ("a:b", "x")),
        ("s3://m:x", ["s3://m"], ("s3://m", "x")),
        ("a:", ["a"], None),
        ("ab:x", ["a"], None),
        ("a", ["a"], None),
    ],
)
def test_an_adapter_stands_behind_its_base(model: str, names: list[str], found: object) -> None:
    assert adapter_of(model, names) == found


def test_an_adapter_is_where_its_route_reads_it() -> None:
    assert orjson.loads(with_model(b'{"model": "x", "n": 1}', "a:x")) == {"model": "a:x", "n": 1}
    assert with_adapter("/v1/messages", b"{}", "x", never) == b"{}"
    assert with_adapter("/generate", b'{"text": "t"}', "x", never) == b'{"text": "t","lora_path":"x"}'
    with pytest.raises(CannotServe, match="/v1/responses ignores LoRA adapters"):
        with_adapter("/v1/responses", b"{}", "x", never)


@pytest.mark.parametrize("said", [b"", b"[]", b"7", b'{"data": 1}', b'{"data": [1]}', b'{"data": [{"parent": "m"}]}'])
def test_what_cannot_be_read_tells_of_no_adapters(said: bytes) -> None:
    assert listed_adapters(said) == frozenset()
    assert listed_adapters(b'{"data": [{"id": "m", "parent": null}, {"id": "x", "parent": "m"}]}') == {"x"}
