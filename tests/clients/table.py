"""The agents that are tried, and what a session makes of each: the table of docs/agents.md, held by the tests it names.

A driver is a program of `drivers/`, run as `PROGRAM BASE_URL MODE` in an empty directory; it prints what its agent says
in the end. A client that is tried in a test of its own has no driver here.
"""

from __future__ import annotations

import json
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
#: More than a JavaScript number holds.
BIG = 2**53 + 1
#: The same with such a number.
ODD_CALCULATION: Sequence[Any] = (*CALCULATION[:4], {"calls": [call("add", a=BIG, b=1)]}, *CALCULATION[4:])
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


def odd_shell(shell: str, read: str, path: str, **more: Any) -> Callable[[], Sequence[Any]]:
    """A task in a shell, with a number that JavaScript rounds, and a call that lacks its last brace.

    Args:
        shell: the tool that runs a `command`.
        read: the tool that reads a file, which `path` names.
        more: what the shell needs beside.
    """

    def run(command: str) -> dict[str, Any]:
        return call(shell, command=command, **more)

    return lambda: (
        {"reasoning": "I look.", "text": "I look.", "calls": [run("echo 17; echo naïve 世界")]},
        {"calls": [run("echo $((17 + 25)) > sum")]},
        {"calls": [run("cat sum"), run("ls")]},
        {"calls": [call(read, **{path: "sum", "limit": BIG})]},
        {"text": "Once more.", "calls": [run("false")]},
        {"calls": [{"name": shell, "arguments": json.dumps(run("echo 1")["arguments"])[:-1]}]},
        {"reasoning": "Done.", "text": "It is 42."},
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
    test="tests/e2e/test_npm_agents.py",
)
CODEX = Client(
    "Codex",
    f"{codex.PACKAGE} {codex.VERSION}",
    "Responses",
    1,
    modes=(STREAMED,),
    test="tests/e2e/test_npm_agents.py",
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
    Client(
        "Strands",
        "strands-agents 1.62.0",
        "chat",
        1,
        driver="strands_agent.py",
        requirements=("strands-agents[openai]==1.62.0",),
        script=lambda: ODD_CALCULATION,
    ),
    Client(
        "Google ADK",
        "google-adk 2.13.0, litellm 1.105.3",
        "chat",
        1,
        driver="adk_agent.py",
        requirements=("google-adk==2.13.0", "litellm==1.105.3"),
        script=lambda: ODD_CALCULATION,
    ),
    Client(
        "AutoGen",
        "autogen-agentchat 0.7.5",
        "chat",
        1,
        driver="autogen_agent.py",
        requirements=("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"),
        script=lambda: ODD_CALCULATION,
    ),
    Client(
        "Agent Framework",
        "agent-framework-core 1.23.0",
        "chat",
        1,
        driver="agent_framework_agent.py",
        requirements=("agent-framework-core==1.23.0", "agent-framework-openai==1.17.0"),
        script=lambda: ODD_CALCULATION,
    ),
    Client(
        "Agno",
        "agno 3.1.10",
        "chat",
        1,
        driver="agno_agent.py",
        requirements=("agno==3.1.10", "openai==3.57.0"),
        script=lambda: ODD_CALCULATION,
    ),
    Client(
        "deepagents",
        "deepagents 0.7.32, langchain-openai 1.7.4",
        "chat",
        1,
        driver="deepagents_agent.py",
        requirements=("deepagents==0.7.32", "langchain-openai==1.7.4"),
        script=lambda: ODD_CALCULATION,
    ),
    Client(
        "pi",
        "@mariozechner/pi-coding-agent 0.73.1",
        "chat",
        1,
        modes=(STREAMED,),
        driver="pi_agent.mjs",
        requirements=("@mariozechner/pi-coding-agent@0.73.1",),
        script=odd_shell("bash", "read", "path"),
    ),
    Client(
        "Qwen Code",
        "@qwen-code/qwen-code 0.24.4",
        "chat",
        1,
        modes=(STREAMED,),
        driver="qwen_code_agent.mjs",
        requirements=("@qwen-code/qwen-code@0.24.4",),
        script=odd_shell("run_shell_command", "read_file", "file_path", is_background=False),
    ),
    Client(
        "OpenCode",
        "opencode-ai 1.18.33",
        "chat",
        2,
        modes=(STREAMED,),
        why="its main line, and the title that it asks for",
        driver="opencode_agent.mjs",
        requirements=("opencode-ai@1.18.33",),
        script=odd_shell("bash", "read", "filePath", description="Runs it."),
    ),
)
