"""What training frameworks expect of sessions, a file each; the only place here that names them."""

from __future__ import annotations

from collections.abc import Sequence

from middleware_hub.openai_session.dialects.dialect import Dialect
from middleware_hub.openai_session.dialects.dressage import DressageDialect

DIALECTS: Sequence[type[Dialect]] = (DressageDialect,)
