"""The API keys given by the settings: single keys, and files of keys. Files are read once, at the start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from miles_router.errors import ConfigError
from miles_router.settings.values import is_none

if TYPE_CHECKING:
    from miles_router.settings.config import RouterConfig


def key_problem(key: str | None) -> str | None:
    """Return why this cannot be a key, or None."""
    if key is None:
        return None
    if is_none(key):
        return "must not be empty, none or null"
    return None if key.isascii() and key.isprintable() and " " not in key else "must be printable ASCII without spaces"


def data_keys(config: RouterConfig) -> tuple[str, ...]:
    """Return the keys of clients.

    Raises:
        ConfigError: the key file cannot be read, or contains no key.
    """
    return _keys("api_key_file", config.api_key, config.api_key_file)


def admin_keys(config: RouterConfig) -> tuple[str, ...]:
    """Return the keys for administration only. Raises as `data_keys` does."""
    return _keys("admin_api_key_file", config.admin_api_key, config.admin_api_key_file)


def _keys(name: str, key: str | None, file: str | None) -> tuple[str, ...]:
    return (*(() if key is None else (key,)), *(() if file is None else _read(name, file)))


def _read(name: str, file: str) -> list[str]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: {file}: cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip()]
    for number, key in enumerate(keys, 1):
        if problem := key_problem(key):
            raise ConfigError(f"{name}: {file}: key {number} {problem}")
    if not keys:
        raise ConfigError(f"{name}: {file}: contains no key; leave the setting out if no key is intended")
    return keys
