"""Scripts: fixed answers of a worker to an agent, step by step, instead of sampling.

    script = [
        {"reasoning": "I look first.", "calls": [{"name": "read", "arguments": {"path": "a.txt"}}]},
        {"text": "There is nothing in it.", "when": "no content"},
        "Done.",
    ]

The request alone determines the step, so that retries, branches and parallel agents get the right answers:

- A step with `when` answers a request that contains this text after its last assistant message.
- Step n of the others answers a request with n assistant messages, counted from 0.
- A step with calls answers only a request with these tools: side calls (titles, summaries) have none.

If no step fits, the answer is sampled. If the prompt's ids end with the beginning of the step, the answer is the rest.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_router.testing.worker.model.constrained import stop_id
from miles_router.testing.worker.model.tool_calls import written_call
from miles_router.testing.worker.model.vocabulary import Tokenizer

FIELDS = frozenset({"text", "reasoning", "calls", "when"})


@dataclass(frozen=True, slots=True)
class Step:
    """One answer of a script.

    `calls` are (name, arguments) pairs; arguments given as a string are written unchanged.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    when: str = ""

    @classmethod
    def read(cls, given: object) -> "Step":
        """Parse a step from JSON: a string, or an object with `FIELDS`.

        Raises:
            ValueError: the JSON is neither.
        """
        if isinstance(given, str):
            return cls(given)
        if not isinstance(given, Mapping) or not given or given.keys() - FIELDS:
            raise ValueError(f"a step of a script is a text or an object of {', '.join(sorted(FIELDS))}: {given!r}")
        texts = {name: given.get(name, "") for name in ("text", "reasoning", "when")}
        calls = given.get("calls", [])
        named = isinstance(calls, Sequence) and all(isinstance(call, Mapping) and "name" in call for call in calls)
        if not named or not all(isinstance(text, str) for text in texts.values()):
            raise ValueError(f"a step's fields must be strings, and its calls objects with a name: {given!r}")
        return cls(**texts, calls=tuple((call["name"], call.get("arguments", {})) for call in calls))

    def written(self, *, thinks: bool = False) -> str:
        """Return the step as the model's text. With `thinks`, a step without reasoning gets an empty think block."""
        nothing = "<think></think>" if thinks else ""
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else nothing
        parts = [self.text, *(written_call(name, arguments) for name, arguments in self.calls)]
        return thought + "\n".join(part for part in parts if part)


class Script:
    """A worker's scripted answers.

    Raises:
        ValueError: a step is malformed.
    """

    def __init__(self, steps: Iterable[object]) -> None:
        read = [Step.read(each) for each in steps]
        self._in_order = [step for step in read if not step.when]
        self._matched = [step for step in read if step.when]

    @classmethod
    def from_file(cls, path: str) -> "Script":
        """Read a script from a JSON list of steps.

        Raises:
            ValueError: the file does not contain a list of steps.
            OSError: it cannot be read.
        """
        try:
            steps = json.loads(Path(path).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is no JSON: {error}") from error
        if not isinstance(steps, list):
            raise ValueError(f"{path} must hold a list of steps")
        return cls(steps)

    def step(self, request: Mapping[str, Any]) -> Step | None:
        """Return the step that answers a chat request, or None."""
        messages = list(request["messages"])
        if request.get("continue_final_message") and messages[-1].get("role") == "assistant":
            messages.pop()  # the beginning of the requested answer
        answers = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
        appended = "\n".join(map(_text, messages[answers[-1] + 1 if answers else 0 :]))
        steps = [step for step in self._matched if step.when in appended]
        steps += self._in_order[len(answers) : len(answers) + 1]
        tools = {tool["function"]["name"] for tool in request.get("tools") or ()}
        return next((step for step in steps if tools.issuperset(name for name, _ in step.calls)), None)

    def play(
        self, request: Mapping[str, Any], input_ids: Sequence[int], tokenizer: Tokenizer, *, thinks: bool = False
    ) -> list[int] | None:
        """Return the ids that answer a chat request, with a stop id at the end, or None to sample."""
        step = self.step(request)
        if step is None:
            return None
        ids = [*tokenizer.encode(step.written(thinks=thinks)), stop_id(tokenizer)]
        given = list(input_ids[-len(ids) :])
        begun = (length for length in range(len(ids) - 1, 0, -1) if given[-length:] == ids[:length])
        return ids[next(begun, 0) :]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
