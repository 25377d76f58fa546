"""Needs a module that is not there, on purpose."""

import no_such_module_anywhere  # type: ignore[import-not-found]  # noqa: F401
