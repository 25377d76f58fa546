"""Blobs that have a header."""

from __future__ import annotations

import pytest

from miles_router.state.blobs import header_of, with_header


def test_what_has_a_header_is_read_as_it_was_written() -> None:
    value = with_header({"a": [1, None]}, (b"be", b"hind"))
    header, begin = header_of(value)
    assert (header, value[begin:]) == ({"a": [1, None]}, b"behind")


@pytest.mark.parametrize("value", [b"", b"\1\0\0", b"\4\0\0\0{}", b"\2\0\0\0[]", b"\1\0\0\0{}"])
def test_what_has_no_header_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # what is wrong is said in words of JSON's
        header_of(value)
