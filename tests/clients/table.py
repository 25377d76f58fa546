"""The agents that are tried, and what a session makes of each: the table of docs/agents.md, held by the tests it names.

A driver is a program of `drivers/`, run as `PROGRAM BASE_URL MODE` in an empty directory; it prints what its agent says
in the end. A client that is tried in a test of its own has no driver here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support import claude_code, codex

WHOLE, STREAMED = "whole", "streamed"
BOTH = (WHOLE, STREAMED)
#: Of every client that is driven here.
TEST = "tests/e2e/test_agent_clients.py"


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


#: Six turns with tools: thoughts, text beside a call, two calls at once, text beyond ASCII, arguments spelled tightly.
CALCULATION: Sequence[Any] = (
    {"reasoning": "I add them.", "text": "I add.", "calls": [call("add", a=17, b=25)]},
    {"calls": [{"name": "add", "arguments": '{"b":1,"a":  42}'}, call("add", a=1, b=2)]},
    {"reasoning": "Hm.", "calls": [call("look", name='naïve 世界 "quoted" 🚀\nline')]},
    {"text": "Once more.\n\nSure.", "calls": [call("add", a=-1, b=10**12)]},
    {"calls": [call("look", name="")]},
    {"reasoning": "Done.", "text": "It is 42."},
)
SHELL: Sequence[Any] = (
    {"reasoning": "I look.", "text": "I look.", "calls": [call("bash", command="echo 17; echo naïve 世界")]},
    {"calls": [{"name": "bash", "arguments": '{"command":"echo $((17 + 25)) > sum"}'}]},
    {"calls": [call("bash", command="cat sum"), call("bash", command="ls")]},
    {"text": "Once more.", "calls": [call("bash", command="false")]},
    {"calls": [call("bash", command="cat sum sum | sort -u > all; cat all")]},
    {"calls": [call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo It is $(cat all).")]},
)


TERMINAL: Sequence[Any] = (
    {"reasoning": "I look.", "text": "I look.", "calls": [call("terminal", command="echo 17; echo naïve 世界")]},
    {"calls": [{"name": "terminal", "arguments": '{"command":"echo $((17 + 25)) > sum"}'}]},
    {"reasoning": "Hm.", "calls": [call("terminal", command="cat sum"), call("think", thought="Is it?")]},
    {"text": "Once more.", "calls": [call("terminal", command="false", summary="Fails")]},
    {"calls": [call("terminal", command="cat sum sum | sort -u", security_risk="LOW")]},
    {"calls": [call("finish", message="It is 42.")]},
)


def edits() -> list[Any]:
    """aider's own form of an edit, one after the other."""
    return [
        {
            "text": f"Sure.\n\nsums.txt\n```\n<<<<<<< SEARCH\nsum {number}\n=======\nsum {number + 1}\n"
            ">>>>>>> REPLACE\n```\n",
            "when": f"Make it {number + 1}.",
        }
        for number in range(5)
    ]


@dataclass(frozen=True)
class Client:
    """One agent.

    Attributes:
        name: as its makers write it.
        packages: with their versions, pinned in `requirements`.
        api: what it speaks to the session.
        segments: how many roots a session has of it, in each mode.
        why: what it does to its history, where that is more than one; or what else it asks.
        driver: its program in `drivers/`; none where `test` has its own.
        python: the oldest that it runs on.
        said: what it says in the end.
    """

    name: str
    packages: str
    api: str
    segments: int
    modes: Sequence[str] = BOTH
    why: str = ""
    driver: str = ""
    requirements: Sequence[str] = ()
    script: Callable[[], Sequence[Any]] = lambda: CALCULATION
    said: str = "It is 42."
    python: tuple[int, int] = (3, 10)
    test: str = TEST

    @property
    def works(self) -> str:
        return " and ".join(self.modes)


def final_answer() -> Sequence[Any]:
    """smolagents ends with a call."""
    return [*CALCULATION[:-1], {"reasoning": "Done.", "calls": [call("final_answer", answer="It is 42.")]}]


CLAUDE_CODE = Client(
    "Claude Code",
    f"{claude_code.PACKAGE} {claude_code.VERSION}",
    "Messages",
    1,
    modes=(STREAMED,),
    why="its main line; each sub-agent is a side call with one of its own",
    test="tests/e2e/test_claude_code.py",
)
CODEX = Client(
    "Codex",
    f"{codex.PACKAGE} {codex.VERSION}",
    "Responses",
    1,
    modes=(STREAMED,),
    test="tests/e2e/test_codex.py",
)

CLIENTS: Sequence[Client] = (
    CLAUDE_CODE,
    CODEX,
    Client(
        "LangGraph",
        "langgraph 1.2.22, langchain-openai 1.7.3",
        "chat",
        1,
        driver="langgraph_agent.py",
        requirements=(
            "langgraph==1.2.22",
            "langgraph-prebuilt==1.1.2",
            "langchain-openai==1.7.3",
            "langchain-core==1.7.2",
        ),
    ),
    Client(
        "Vercel AI SDK",
        "ai 6.0.326, @ai-sdk/openai-compatible 2.0.91",
        "chat",
        1,
        driver="vercel_agent.mjs",
        requirements=("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.91", "zod@4.6.7"),
    ),
    Client(
        "Pydantic AI",
        "pydantic-ai-slim 2.68.0",
        "chat",
        1,
        driver="pydantic_agent.py",
        requirements=("pydantic-ai-slim[openai]==2.68.0",),
    ),
    Client(
        "OpenHands",
        "openhands-sdk 1.58.0, litellm 1.105.3",
        "chat",
        1,
        driver="openhands_agent.py",
        requirements=("openhands-sdk==1.58.0", "openhands-tools==1.58.0", "litellm==1.105.3"),
        script=lambda: TERMINAL,
        python=(3, 12),
    ),
    Client(
        "litellm's Anthropic adapter",
        "litellm 1.81.10",
        "chat",
        1,
        driver="litellm_messages.py",
        requirements=("mini-swe-agent==2.4.6", "litellm==1.81.10"),
    ),
    Client(
        "mini-swe-agent",
        "mini-swe-agent 2.4.6, litellm 1.81.10",
        "chat",
        1,
        modes=(WHOLE,),
        driver="mini_swe_agent.py",
        requirements=("mini-swe-agent==2.4.6", "litellm==1.81.10"),
        script=lambda: SHELL,
    ),
    Client(
        "smolagents",
        "smolagents 1.26.0",
        "chat",
        6,
        why="one for each turn, for it writes its calls into the text of its messages",
        driver="smolagents_agent.py",
        requirements=("smolagents[openai]==1.26.0",),
        script=final_answer,
    ),
    Client(
        "aider",
        "aider-chat 0.86.2",
        "chat",
        5,
        why="one for each request, for it moves the files that it shows",
        driver="aider_agent.py",
        requirements=("aider-chat==0.86.2",),
        script=edits,
        said="sum 5",
    ),
)
