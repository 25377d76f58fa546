"""The APIs that agents speak, a file each: a request to messages, tools and settings, an answer to the API's own."""

from __future__ import annotations

from collections.abc import Sequence

from middleware_hub.openai_session.faces.chat import ChatFace
from middleware_hub.openai_session.faces.completions import CompletionsFace
from middleware_hub.openai_session.faces.face import Face

FACES: Sequence[type[Face]] = (ChatFace, CompletionsFace)
