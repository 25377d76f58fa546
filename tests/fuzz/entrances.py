"""All targets."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz.client_requests import ClientRequests
from tests.fuzz.event_streams import EventStreams
from tests.fuzz.generate_answers import GenerateAnswers
from tests.fuzz.json_bytes import JsonBytes
from tests.fuzz.session_bodies import SessionBodies
from tests.fuzz.target import Target
from tests.fuzz.worker_replies import WorkerReplies

KINDS = (ClientRequests, WorkerReplies, EventStreams, JsonBytes, GenerateAnswers, SessionBodies)
TARGETS: Mapping[str, type[Target]] = {kind.name: kind for kind in KINDS}
