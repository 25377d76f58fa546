"""Discovery sources: each reads the workers that it lists now. Light imports: the settings check sources here."""

from __future__ import annotations

import asyncio
import shlex
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from miles_router.errors import BadRequest
from miles_router.fleet.worker_url import parse_worker_url

#: The arguments of one worker's registration, as in the body of `POST /workers`.
Listed = Mapping[str, str]

#: Bounds of a file. A DNS answer has at most 64 kB.
MAX_FILE_BYTES, MAX_WORKERS = 4 * 1024 * 1024, 10_000
MAX_PORT = 65535
DNS, FILE = "dns://", "file:"
#: The fields that a line or a DNS source may have beside the address.
FIELDS = frozenset({"model_id", "worker_type", "bootstrap_port", "labels", "priority", "cost", "api_key"})


class SourceUnreadable(Exception):
    """A source could not be read, or what was read may be incomplete; its last list stays valid."""


class Source(ABC):
    """A list of workers kept outside of the router. `name` is the text of the setting."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    async def read(self) -> Sequence[Listed]:
        """Return the workers that the source lists now. Raises SourceUnreadable if that is not known."""


class DnsSource(Source):
    """All addresses of a DNS name. A headless service of Kubernetes has those of its ready pods."""

    def __init__(self, name: str, host: str, port: int, fields: Listed) -> None:
        super().__init__(name)
        self._host, self._port, self._fields = host, port, fields

    async def read(self) -> Sequence[Listed]:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise SourceUnreadable(f"{self._host} cannot be resolved: {error}") from None
        hosts = dict.fromkeys(str(address[0]) for *_, address in found if "%" not in str(address[0]))  # not link-local
        urls = [f"http://{f'[{host}]' if ':' in host else host}:{self._port}" for host in hosts]
        return [{**self._fields, "url": parse_worker_url(url).url} for url in urls]


class FileSource(Source):
    """A file with one worker a line: its URL, then `name=value` fields, as a shell would split them; `#` comments.

    A writer may replace the file or write it in place: a file without a line, or whose last line has no line feed, may
    be half written.
    """

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name)
        self._path = path

    async def read(self) -> Sequence[Listed]:
        try:
            # In a thread: a network file system may hang.
            content = await asyncio.get_running_loop().run_in_executor(None, self._content)
            return parse_file(content.decode())
        except (OSError, ValueError) as error:
            raise SourceUnreadable(f"{self._path}: {error}") from None

    def _content(self) -> bytes:
        with self._path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        return content


def parse_file(text: str) -> list[Listed]:
    """Return the workers of a discovery file.

    Raises:
        ValueError: a line is invalid, the file may be half written, or it lists too many workers.
    """
    if not text.endswith("\n"):
        raise ValueError("it is empty, or its last line has no line feed; it may be half written")
    listed = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            words = shlex.split(line, comments=True)
            if words:
                listed.append(_worker(words))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    if len(listed) > MAX_WORKERS:
        raise ValueError(f"it lists more than {MAX_WORKERS} workers")
    return listed


def _worker(words: Sequence[str]) -> Listed:
    try:
        url = parse_worker_url(words[0]).url
    except BadRequest as error:
        raise ValueError(str(error)) from None
    return {**_fields(word.partition("=")[::2] for word in words[1:]), "url": url}


def _fields(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for name, value in pairs:
        if name not in FIELDS or name in fields or not value:
            raise ValueError(f"{name!r} must be one of {', '.join(sorted(FIELDS))}, with =VALUE, and only once")
        fields[name] = value
    return fields


def parse_source(text: str) -> Source:
    """Return the source that a setting names: `dns://NAME:PORT[?FIELD=VALUE]` or `file:PATH`.

    Raises:
        ValueError: the text names no source.
    """
    if text.startswith(FILE) and (path := text.removeprefix(FILE)):
        return FileSource(text, Path(path))
    if not text.startswith(DNS):
        raise ValueError(f"{text!r} must be dns://NAME:PORT or file:PATH")
    parts = urlsplit(text)
    host, _, port = parts.netloc.rpartition(":")
    if not host or "@" in host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT or parts.path or parts.fragment:
        raise ValueError(f"{text!r} must be dns://NAME:PORT, with a port from 1 to 65535")
    fields = _fields(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    if "api_key" in fields:
        raise ValueError("dns://: a key would be shown with the settings; name workers with keys in a file")
    return DnsSource(text, host, int(port), fields)


def sources_problem(texts: Iterable[str]) -> str | None:
    """Return why these name no sources, or None."""
    try:
        for text in texts:
            parse_source(text)
    except ValueError as error:
        return str(error)
    return None
