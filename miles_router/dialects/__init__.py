"""What training frameworks expect of a router, a file for each family of them."""

from miles_router.dialects.slime import MIDDLEWARE_PATHS, NAMES, namespace_of, settings_of

__all__ = ["MIDDLEWARE_PATHS", "NAMES", "namespace_of", "settings_of"]
