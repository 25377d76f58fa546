"""The APIs that agents speak. Each translates a request to messages, tools and settings, and the answer back. Larger
ones are folders."""

from __future__ import annotations

from collections.abc import Sequence

from middleware_hub.openai_session.faces.chat import ChatFace
from middleware_hub.openai_session.faces.completions import CompletionsFace
from middleware_hub.openai_session.faces.face import Face
from middleware_hub.openai_session.faces.messages.face import MessagesFace
from middleware_hub.openai_session.faces.responses.face import ResponsesFace

FACES: Sequence[type[Face]] = (ChatFace, CompletionsFace, MessagesFace, ResponsesFace)
