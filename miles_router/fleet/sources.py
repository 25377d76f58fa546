"""Discovery sources: each reads the workers that it lists now. Light imports: the settings check sources here."""

from __future__ import annotations

import asyncio
import shlex
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from miles_router.errors import BadRequest
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import ROLE, Role

#: The arguments of one worker's registration, as in the body of `POST /workers`.
Listed = Mapping[str, str]

#: Bounds of a file. A DNS answer has at most 64 kB.
MAX_FILE_BYTES, MAX_LINE, MAX_WORKERS = 4 * 1024 * 1024, 8 * 1024, 10_000
MAX_PORT = 65535
DNS, FILE = "dns://", "file:"
#: The fields that a line or a DNS source may have besides the address.
FIELDS = frozenset({"model_id", "worker_type", "bootstrap_port", "labels", "priority", "cost", "api_key"})


class SourceUnreadable(Exception):
    """A source of worker addresses could not be read, or its list may be incomplete. Its last list stays valid."""


class Source(ABC):
    """A list of workers kept outside of the router. `name` is the text of the setting."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def read(self) -> Sequence[Listed]:
        """Return the workers that the source lists now. Raises SourceUnreadable if that is not known.

        It may take forever, because a resolver or a network file system may hang. A daemon thread waits there: the
        process can end meanwhile, which the threads of an executor would prevent.
        """
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Sequence[Listed]] = loop.create_future()

        def work() -> None:
            try:
                listed, error = self.look_up(), None
            except (OSError, ValueError) as failure:
                listed, error = [], SourceUnreadable(f"{self.name}: {failure}")
            with suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(_settle, found, listed, error)

        threading.Thread(target=work, name=f"read {self.name}", daemon=True).start()
        return await found

    @abstractmethod
    def look_up(self) -> Sequence[Listed]:
        """Return the workers that the source lists now; blocks. Raises OSError or ValueError if that is not known."""


def _settle(found: asyncio.Future[Sequence[Listed]], listed: Sequence[Listed], error: SourceUnreadable | None) -> None:
    if found.done():  # cancelled
        return
    if error is None:
        found.set_result(listed)
    else:
        found.set_exception(error)


class DnsSource(Source):
    """All addresses of a DNS name. A headless service of Kubernetes has the addresses of its ready pods."""

    def __init__(self, name: str, host: str, port: int, fields: Listed) -> None:
        super().__init__(name)
        self._host, self._port, self._fields = host, port, fields

    def look_up(self) -> Sequence[Listed]:
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
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

    def look_up(self) -> Sequence[Listed]:
        with self._path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        return parse_file(content.decode())


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
            if len(line) > MAX_LINE:  # the time of `shlex` grows with the square of a word
                raise ValueError(f"it has more than {MAX_LINE} characters")
            if words := shlex.split(line, comments=True):
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
    for number, (name, value) in enumerate(pairs, 1):
        if name not in FIELDS or name in fields or not value:  # a wrong word may be a key, so it is not shown
            raise ValueError(f"field {number} must be one of {', '.join(sorted(FIELDS))}, with =VALUE, and only once")
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
    if (
        not host
        or {*"@[]"} & {*host}
        or not port.isdecimal()
        or not 0 < int(port) <= MAX_PORT
        or parts.path
        or parts.fragment
    ):
        raise ValueError(f"{text!r} must be dns://NAME:PORT, with a port from 1 to 65535")
    fields = _fields(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    if "api_key" in fields:
        raise ValueError("dns://: a key would be shown with the settings; name workers with keys in a file")
    if (role := fields.get(ROLE, Role.REGULAR)) not in [*Role]:
        raise ValueError(f"dns://: {ROLE} must be one of {', '.join(Role)}, got {role!r}")
    return DnsSource(text, host, int(port), fields)


def sources_problem(texts: Iterable[str]) -> str | None:
    """Return why these name no sources, or None."""
    try:
        for text in texts:
            parse_source(text)
    except ValueError as error:
        return str(error)
    return None
