"""A process that encodes long texts outside the router's interpreter lock, and that can be killed.

    python -m middleware_hub.tokenizing.encoder_process

The standard input carries pickles: first a packed tokenizer, then one piece of work after another. The standard output
carries the result of each. The process ends when its input ends, so it does not outlive its router.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from middleware_hub.tokenizing.encoding import TextEncoder
from miles_router.errors import RouterError, Unavailable

#: Work that can be pickled, such as an `operator.methodcaller`.
EncoderWork = Callable[[TextEncoder], Any]


class PackedTokenizer(NamedTuple):
    """The parts of a tokenizer that a `TextEncoder` needs: its `tokenizer.json`, and the beginning-of-sequence id."""

    json: str
    bos_token_id: int | None

    @classmethod
    def of(cls, tokenizer: Any) -> PackedTokenizer:
        """Pack a transformers tokenizer. Takes some tenths of a second for a large vocabulary."""
        return cls(tokenizer.backend_tokenizer.to_str(), tokenizer.bos_token_id)

    @property
    def backend_tokenizer(self) -> Any:
        """A new `tokenizers.Tokenizer`."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.json)


class EncoderProcess:
    """One encoder process. Every method except `kill` blocks, so call it in a thread.

    Raises:
        Unavailable: the operating system refuses to start a process.
    """

    def __init__(self, tokenizer: PackedTokenizer) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # A separate process group: Ctrl-C reaches only the router, which lets requests in flight finish.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"},
            )
        except OSError as error:
            raise Unavailable(f"cannot start a process that encodes long texts: {error.strerror}") from None
        self._unsent: PackedTokenizer | None = tokenizer

    def run(self, work: EncoderWork) -> Any:
        """Run the work in the process and return its result.

        Raises:
            Unavailable: the process ended first.
            RouterError: the work raised it.
        """
        source, results = self._process.stdin, self._process.stdout
        assert source is not None
        assert results is not None
        try:
            if self._unsent is not None:
                pickle.dump(tuple(self._unsent), source, protocol=pickle.HIGHEST_PROTOCOL)
                self._unsent = None
            pickle.dump(work, source, protocol=pickle.HIGHEST_PROTOCOL)
            source.flush()
            failure, result = pickle.load(results)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise Unavailable("the process that encodes long texts ended too early; repeat the request") from None
        if failure is not None:
            raise failure
        return result

    def kill(self) -> None:
        """Kill the process at once, whatever it does. Call `close` afterwards."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process, wait for it, and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # closing flushes buffered input, and the reader is gone
                pipe.close()


def main() -> None:
    """Run work from the standard input until it ends."""
    source = sys.stdin.buffer
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keep a library's prints out of the results
    encoder: TextEncoder | None = None
    while True:
        try:
            content = pickle.load(source)
        except EOFError:
            return
        if encoder is None:
            encoder = TextEncoder(PackedTokenizer(*content))
            continue
        failure, result = None, None
        try:
            result = content(encoder)
        except RouterError as error:
            failure = error
        pickle.dump((failure, result), results, protocol=pickle.HIGHEST_PROTOCOL)
        results.flush()


if __name__ == "__main__":
    main()
