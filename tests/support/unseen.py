"""Characters that nobody sees, or that make others read otherwise, and how pages of ours show them."""

from __future__ import annotations

#: Of every kind: a soft hyphen, spaces that are none, fillers, joiners, marks and overrides of the direction, ends of
#: lines and paragraphs, variation selectors, tags, a control, one of nobody's.
UNSEEN = (
    "\u00ad\u00a0\u2003\u3000\u115f\u3164\u2800\u200b\u200d\u200f\u202e\u2066\ufeff\u2028\u2029\ufe0f"
    "\U000e0041\x1b\ue000"
)


def seen(text: str) -> str:
    """A text as a page shows it: these by number."""
    return "".join(f"⟨U+{ord(each):04X}⟩" if each in UNSEEN else each for each in text)
