"""Matching of tool calls whose ids an agent library has replaced, in a call and in its result alike.

If the chat template cannot tell the old id from the new one, a history with replaced ids is the recorded history.
A call that comes back without an id matches any call at its position. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from middleware_hub.openai_session.sessions.equality import Equality
from middleware_hub.openai_session.sessions.messages import Message, is_unnamed

if TYPE_CHECKING:
    from middleware_hub.openai_session.sessions.history import HistoryNode

#: `(held, sent)`: True if the chat template cannot tell these two call ids apart.
SameId = Callable[[object, object], bool]


def restore_ids(begin: HistoryNode, messages: Sequence[Message], equal: Equality, same_id: SameId) -> Sequence[Message]:
    """Return the messages with the recorded ids of their calls; the same object if no id changes.

    Args:
        begin: the node whose children the first message is compared with.
    """
    nodes: Sequence[HistoryNode] = [begin]
    recorded_ids: dict[object, object] = {}  # sent id to recorded id, for the calls of the last answer
    renamed: list[Message] = []
    changed = False
    for message in messages:
        restored = _with_result_id(message, recorded_ids)
        if _call_ids(message):
            recorded_ids = {}
        children = [child for node in nodes for child in node.children]
        nodes = [child for child in children if child.matches(restored, equal)]
        if not nodes and _call_ids(message):
            for child in reversed(children):
                found = _match_ids(child.message, message, same_id)
                if found and equal(child.message, _with_call_ids(message, found)):
                    nodes, recorded_ids, restored = [child], found, _with_call_ids(message, found)
                    break
        changed = changed or restored is not message
        renamed.append(restored)
    return renamed if changed else messages


def _call_ids(message: Message) -> list[object]:
    calls = message.get("tool_calls")
    return [call.get("id") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def _match_ids(held: Message, sent: Message, same_id: SameId) -> dict[object, object]:
    """Return the recorded id for each sent id; {} if the numbers of calls differ, or a message repeats an id."""
    ones, others = _call_ids(held), _call_ids(sent)
    comparable = len(ones) == len(others) == len(set(map(str, ones))) == len(set(map(str, others)))
    if not comparable or not all(
        is_unnamed(other) or same_id(one, other) for one, other in zip(ones, others, strict=True)
    ):
        return {}
    return {str(sent_id): held_id for held_id, sent_id in zip(ones, others, strict=True)}


def _with_call_ids(message: Message, recorded_ids: Mapping[object, object]) -> Message:
    calls: list[Any] = [{**call, "id": recorded_ids[str(call.get("id"))]} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _with_result_id(message: Message, recorded_ids: Mapping[object, object]) -> Message:
    held = recorded_ids.get(str(message.get("tool_call_id"))) if message.get("role") == "tool" else None
    return message if held is None else {**message, "tool_call_id": held}
