"""The sub-API for generation, for middlewares that record generations.

The classes report progress to clients and the log, and resume a turn that a pause or a lost worker cut.
`router.resume` is None if turns are not resumed.
"""

from miles_router.asgi.exchange import Mark
from miles_router.asgi.replies import UnreadCounter
from miles_router.asgi.watch import Heartbeat, HeartbeatForm
from miles_router.fleet.evaluation import Evaluation, asks_for_evaluation
from miles_router.generation.attempt import Attempt, ContinuedRequest, FollowingStream, ResumeServices
from miles_router.generation.chat import ChatGeneration
from miles_router.generation.generation import CannotResume, ResumableGeneration
from miles_router.generation.message import MessageReader
from miles_router.generation.questions import EngineQuestions
from miles_router.generation.seam import Seam
from miles_router.middlewares.invalid_answers import flag_worker

__all__ = [
    "Attempt",
    "CannotResume",
    "ChatGeneration",
    "ContinuedRequest",
    "EngineQuestions",
    "Evaluation",
    "FollowingStream",
    "Heartbeat",
    "HeartbeatForm",
    "Mark",
    "MessageReader",
    "ResumableGeneration",
    "ResumeServices",
    "Seam",
    "UnreadCounter",
    "asks_for_evaluation",
    "flag_worker",
]
