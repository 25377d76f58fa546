"""What training frameworks expect of sessions, a file each; the only place here that names them."""

from __future__ import annotations

from collections.abc import Sequence

from middleware_hub.openai_session.dialects.dialect import Dialect
from middleware_hub.openai_session.dialects.dressage import DressageDialect
from middleware_hub.openai_session.dialects.miles import MilesForm

DIALECTS: Sequence[type[Dialect]] = (DressageDialect,)
#: Forms of samples that a framework's own client reads.
FORMS = (MilesForm,)
