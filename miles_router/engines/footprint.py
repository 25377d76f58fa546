"""How many tokens the prompt of a request has, as its bytes tell, at no cost that grows with them.

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


def prompt_tokens(body: bytes) -> int:
    """About how many; wrong by some percent for ids, and by a third or so for text in other scripts than Latin."""
    begin = max(0, (len(body) - _SAMPLE) // 2)
    commas = body.count(b",", begin, begin + _SAMPLE)
    if len(body) > _SAMPLE and commas > _COMMAS:
        return len(body) * commas // _SAMPLE
    image = len(body) > _SAMPLE and not body[begin : begin + _SAMPLE].translate(None, _BASE64)
    return len(body) // (_BYTES_OF_IMAGE if image else _BYTES_OF_TEXT)
