"""What training frameworks expect, a file for each family of them.

Imports nothing else of the router, so that every part of it can speak a dialect.
"""

from miles_router.dialects.slime import MIDDLEWARE_PATHS, NAMES, namespace_of, settings_of, trainer_fields

__all__ = ["MIDDLEWARE_PATHS", "NAMES", "namespace_of", "settings_of", "trainer_fields"]
