"""How many tokens the prompt of a request has, as its bytes tell, at no cost that grows with them; and how many were
sampled, as the end of its answer tells.

Ids are counted by the commas in a part of them; of text a token has four bytes in the mean. What is not the prompt is
taken for a part of it: beside a prompt that weighs anything it is small. Of an image nobody knows before it is decoded:
a JPEG of a megapixel has some 1,300 tokens (Qwen2.5-VL) and 600 kB of base64.
"""

from __future__ import annotations

import string

_SAMPLE = 256
#: Ids have at most six digits: more commas than this, and they are ids.
_COMMAS = _SAMPLE // 8
_BYTES_OF_TEXT, _BYTES_OF_IMAGE = 4, 500
_BASE64 = (string.ascii_letters + string.digits + "+/=").encode("ascii")
#: In `meta_info`, and in the `usage` of OpenAI's routes. In a text its quotes would be escaped.
_COUNT = b'"completion_tokens"'
_COLON = len(_COUNT) + 1
_DIGITS, _BEHIND = 10, b" \r\n]}"


def sampled_tokens(end: bytes) -> int:
    """How many an answer says that were sampled for it, the last one where there are several; 0 where its end does not
    say it, since it streams without usage, say, or rows of experts stand behind."""
    at = end.rfind(_COUNT)
    if at < 0:
        return 0
    begin = at + _COLON
    try:
        return max(0, int(end[begin : begin + _DIGITS].partition(b",")[0].rstrip(_BEHIND)))
    except ValueError:  # null
        return 0


def prompt_tokens(body: bytes) -> int:
    """About how many; wrong by some percent for ids, and by a third or so for text in other scripts than Latin."""
    begin = max(0, (len(body) - _SAMPLE) // 2)
    commas = body.count(b",", begin, begin + _SAMPLE)
    if len(body) > _SAMPLE and commas > _COMMAS:
        return len(body) * commas // _SAMPLE
    image = len(body) > _SAMPLE and not body[begin : begin + _SAMPLE].translate(None, _BASE64)
    return len(body) // (_BYTES_OF_IMAGE if image else _BYTES_OF_TEXT)
