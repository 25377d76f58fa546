"""Routes and forms of samples for training frameworks, one file each. Only this folder names frameworks."""

from __future__ import annotations

from collections.abc import Sequence

from middleware_hub.openai_session.dialects.dialect import Dialect
from middleware_hub.openai_session.dialects.dressage import DressageDialect
from middleware_hub.openai_session.dialects.miles import MilesForm

DIALECTS: Sequence[type[Dialect]] = (DressageDialect,)
#: Forms of samples that clients of frameworks read.
FORMS = (MilesForm,)
