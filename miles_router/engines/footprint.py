"""Estimates of a request's prompt length and an answer's sampled tokens, in constant time. No I/O.

A prompt of ids is estimated by the commas in a sample of the body, a text by four bytes per token. The rest of the body
counts as prompt too; it is small compared with a large prompt. The tokens of an image are unknown before it is decoded:
a JPEG of a megapixel has about 1,300 tokens (Qwen2.5-VL) and 600 kB of base64.
"""

from __future__ import annotations

import string

_SAMPLE = 256
#: Ids have at most six digits: a sample with more commas than this contains ids.
_COMMAS = _SAMPLE // 8
_BYTES_OF_TEXT, _BYTES_OF_IMAGE = 4, 500
_BASE64 = (string.ascii_letters + string.digits + "+/=").encode("ascii")
#: A table for `bytes.translate` that changes all bytes except the base64 alphabet.
_OTHERS_CHANGED = bytes(byte if byte in _BASE64 else ord("A") for byte in range(256))
#: The field in `meta_info` and in the `usage` of OpenAI's routes. Inside a string its quotes would be escaped.
_COUNT = b'"completion_tokens"'
_COLON = len(_COUNT) + 1
_DIGITS, _BEHIND = 10, b" \r\n]}"


def sampled_tokens(end: bytes) -> int:
    """Return the number of sampled tokens that the end of an answer reports, the last one if there are several. 0 if it
    is not there: the stream has no usage, or expert rows follow it."""
    at = end.rfind(_COUNT)
    if at < 0:
        return 0
    begin = at + _COLON
    try:
        return max(0, int(end[begin : begin + _DIGITS].partition(b",")[0].rstrip(_BEHIND)))
    except ValueError:  # null
        return 0


def prompt_tokens(body: bytes) -> int:
    """Return about how many tokens the prompt has. The error is some percent for ids, and about a third for non-Latin
    text."""
    size = len(body)
    if size <= _SAMPLE:
        return size // _BYTES_OF_TEXT
    begin = (size - _SAMPLE) // 2
    sample = body[begin : begin + _SAMPLE]
    commas = sample.count(b",")
    if commas > _COMMAS:
        return size * commas // _SAMPLE
    image = sample.translate(_OTHERS_CHANGED) == sample
    return size // (_BYTES_OF_IMAGE if image else _BYTES_OF_TEXT)
