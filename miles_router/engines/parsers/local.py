"""The table of model families and their local parsers, and the choice between local and engine parsers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from miles_router.engines.facts import Facts
from miles_router.engines.parsers.families.deepseek import DeepSeekMarks, DeepSeekTags
from miles_router.engines.parsers.families.deepseek_v4 import DeepSeekV4, DeepSeekV4Thinking
from miles_router.engines.parsers.families.glm import Glm
from miles_router.engines.parsers.families.harmony import Harmony
from miles_router.engines.parsers.families.hermes import Hermes
from miles_router.engines.parsers.families.kimi import Kimi
from miles_router.engines.parsers.families.minimax import MiniMax
from miles_router.engines.parsers.families.qwen_coder import QwenCoder
from miles_router.engines.parsers.reading import CallFormat
from miles_router.engines.parsers.thinking import ReasoningFormat, Thinking

Mode = Literal["engine", "local", "hybrid"]
MODES: tuple[str, ...] = get_args(Mode)

_QWEN = Thinking(call="<tool_call>")
_PLAIN = Thinking()


class LocalParser(NamedTuple):
    """The formats in which a family writes reasoning and tool calls."""

    thinking: ReasoningFormat
    calls: CallFormat


#: Parsers by family: the names that `tito_model` accepts, and the names that the library behind it uses.
FAMILIES: Mapping[str, LocalParser] = {
    **dict.fromkeys(("qwen3", "qwen3-next", "qwennext"), LocalParser(_QWEN, Hermes())),
    **dict.fromkeys(("qwen3.5", "qwen35"), LocalParser(_QWEN, QwenCoder())),
    **dict.fromkeys(("nemotron", "nemotron3"), LocalParser(_QWEN, QwenCoder())),
    **dict.fromkeys(("glm-4.7", "glm47"), LocalParser(_QWEN, Glm())),
    **dict.fromkeys(("kimi", "kimi26", "kimi25"), LocalParser(Thinking(call=Kimi.begin), Kimi())),
    **dict.fromkeys(("minimax", "minimax_m27", "minimax_m25"), LocalParser(_QWEN, MiniMax())),
    **dict.fromkeys(("deepseek", "deepseekv32"), LocalParser(_QWEN, DeepSeekTags())),
    "deepseekv3": LocalParser(_QWEN, DeepSeekMarks(fenced=True)),
    "deepseekv31": LocalParser(_QWEN, DeepSeekMarks()),
    "deepseekv4": LocalParser(DeepSeekV4Thinking(), DeepSeekV4()),
    "gpt-oss": LocalParser(Harmony(), Harmony()),
}
#: Formats by the engine's name of the parser.
CALLS: Mapping[str, CallFormat] = {
    **dict.fromkeys(("qwen", "qwen25"), Hermes()),
    **dict.fromkeys(("qwen3_coder", "step3p5", "nanbeige"), QwenCoder()),
    "kimi_k2": Kimi(),
    "minimax-m2": MiniMax(),
    "deepseekv3": DeepSeekMarks(fenced=True),
    "deepseekv31": DeepSeekMarks(),
    "deepseekv32": DeepSeekTags(),
    "deepseekv4": DeepSeekV4(),
    "glm47": Glm(),
    "gpt-oss": Harmony(),
}
THINKING: Mapping[str, ReasoningFormat] = {
    **dict.fromkeys(("qwen3", "qwen3-thinking", "minimax", "nanbeige", "interns1", "deepseek-v3", "mimo"), _QWEN),
    **dict.fromkeys(("glm45", "nemotron_3"), _QWEN),
    "deepseek-r1": _PLAIN,
    "kimi_k2": Thinking(call=Kimi.begin),
    "deepseek-v4": DeepSeekV4Thinking(),
    "gpt-oss": Harmony(),
}
#: The marks around reasoning: the usual marks, and the marks of engine parsers that use others. A prompt never opens
#: the reasoning of gpt-oss.
USUAL_MARKS = (_PLAIN.begin, _PLAIN.end)
MARKS: Mapping[str, tuple[str, str]] = {
    "gpt-oss": ("", "<|end|>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "minimax-m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}


def reasoning_marks(parser: str) -> tuple[str, str]:
    """Return the marks that begin and end reasoning for one of the engine's parsers."""
    return MARKS.get(parser, USUAL_MARKS)


@dataclass(frozen=True)
class Parsers:
    """The setting that decides which parsers turn texts into messages.

    Attributes:
        mode: `engine`: the engine's own parsers; `local`: local parsers; `hybrid`: local parsers only if the engine has
            none or fails.
        family: the family of the model, for local parsers.
    """

    mode: Mode = "hybrid"
    family: str | None = None

    @classmethod
    def from_settings(cls, mode: str, family: str | None) -> Parsers:
        """Return the parsers for these settings.

        Raises:
            ValueError: the mode is unknown, or `local` has no parser for the family.
        """
        if mode not in MODES:
            raise ValueError(f"parsers: {mode!r} is not one of {', '.join(MODES)}")
        if mode == "local" and family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ValueError(f"parsers: there is no local parser for tito_model {family!r}; choose one of: {known}")
        return cls(mode, family)  # type: ignore[arg-type]

    def call_format(self, facts: Facts) -> CallFormat | None:
        """Return the local format of tool calls; None if there is none, or if the engine parses."""
        if self.mode == "engine":
            return None
        family = FAMILIES.get(self.family or "")
        return CALLS.get(facts.tool_call_parser or "", family.calls if family is not None else None)

    def reasoning_format(self, facts: Facts) -> ReasoningFormat | None:
        """Return the local format of reasoning; None if there is none, or if the engine parses."""
        if self.mode == "engine":
            return None
        family = FAMILIES.get(self.family or "")
        return THINKING.get(facts.reasoning_parser or "", family.thinking if family is not None else None)
