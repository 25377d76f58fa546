"""The APIs that agents speak. Each translates a request to messages, tools and settings, and the answer back; each is a
file, or a folder where there is more to translate."""

from __future__ import annotations

from collections.abc import Sequence

from middleware_hub.openai_session.faces.chat import ChatFace
from middleware_hub.openai_session.faces.completions import CompletionsFace
from middleware_hub.openai_session.faces.face import Face
from middleware_hub.openai_session.faces.messages.face import MessagesFace
from middleware_hub.openai_session.faces.responses.face import ResponsesFace

FACES: Sequence[type[Face]] = (ChatFace, CompletionsFace, MessagesFace, ResponsesFace)
