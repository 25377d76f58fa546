"""What training frameworks expect, one file for each.

Imports nothing else of the router, so that every part of it can speak a dialect.
"""

from miles_router.dialects.slime import legacy_args, trainer_fields

__all__ = ["legacy_args", "trainer_fields"]
