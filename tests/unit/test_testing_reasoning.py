"""The simulated worker's reasoning parser: markers are found however the text is cut, and nothing is lost."""

from collections.abc import Iterator

import pytest

from miles_router.testing.worker.model.reasoning import ReasoningStream, separated

CASES = [
    ("<think>\nwhy\n</think>\n\nbecause", True, "\nwhy\n", "\n\nbecause"),
    ("why</think>because", True, "why", "because"),
    ("<think>why</think>because", False, "why", "because"),
    ("no thoughts", False, "", "no thoughts"),
    ("never ends", True, "never ends", ""),
    ("why\n<tool_call>\n{}\n</tool_call>", True, "why\n", "<tool_call>\n{}\n</tool_call>"),
    ("a <thi b </thin c <tool_", True, "a <thi b </thin c <tool_", ""),
    ("</think>", True, "", ""),
    ("", True, "", ""),
]


def pieces(text: str, size: int) -> Iterator[tuple[str, bool]]:
    for begin in range(0, max(len(text), 1), size):
        yield text[begin : begin + size], begin + size >= len(text)


@pytest.mark.parametrize(("text", "thinking", "reasoning", "rest"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_reasoning_is_separated_however_the_text_is_cut(
    text: str, thinking: bool, reasoning: str, rest: str, size: int
) -> None:
    stream = ReasoningStream(thinking=thinking)
    parts = [stream.push(piece, last=last) for piece, last in pieces(text, size)]
    assert ("".join(part for part, _ in parts), "".join(part for _, part in parts)) == (reasoning, rest)


@pytest.mark.parametrize(("text", "thinking", "reasoning", "rest"), CASES)
def test_a_finished_text_is_separated_at_once(text: str, thinking: bool, reasoning: str, rest: str) -> None:
    assert separated(text, thinking=thinking) == (reasoning, rest)


def test_reasoning_is_shown_while_it_grows() -> None:
    stream = ReasoningStream(thinking=True)
    assert stream.push("<think>one ", last=False) == ("one ", "")
    assert stream.push("two</th", last=False) == ("two", "")
    assert stream.push("ink>three", last=False) == ("", "three")
