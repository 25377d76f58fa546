"""A process that encodes texts: its work takes nothing from the router's interpreter lock, and can be ended.

    python -m middleware_hub.tokenizing.encoder_process

Pickles go in by its standard input: first a packed tokenizer, then one piece of work after the other. What each gave
comes out by its standard output. It ends when its input does, so it does not outlive its router.
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
from miles_router.errors import RouterError

#: Work that can be pickled, such as an `operator.methodcaller`.
EncoderWork = Callable[[TextEncoder], Any]


class PackedTokenizer(NamedTuple):
    """All that a `TextEncoder` needs of a tokenizer: its `tokenizer.json`, and the id that texts begin with."""

    json: str
    bos_token_id: int | None

    @classmethod
    def of(cls, tokenizer: Any) -> PackedTokenizer:
        """A transformers tokenizer, packed. Takes some tenths of a second where its vocabulary is large."""
        return cls(tokenizer.backend_tokenizer.to_str(), tokenizer.bos_token_id)

    @property
    def backend_tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`, made anew."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.json)


class EncoderLost(RouterError):
    """The process that encodes long texts ended in the middle of one, or none could be started; the request may be
    repeated."""

    status = 503
    type = "encoder_lost"
    retryable = True


class EncoderProcess:
    """One process. All but `kill` blocks, and belongs into a thread.

    Raises:
        EncoderLost: the system lets us start none.
    """

    def __init__(self, tokenizer: PackedTokenizer) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Not in our group: Ctrl-C reaches the router alone, which lets requests in flight finish.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"},
            )
        except OSError as error:
            raise EncoderLost(f"no process that encodes long texts can be started: {error.strerror}") from None
        self._unsent: PackedTokenizer | None = tokenizer

    def run(self, work: EncoderWork) -> Any:
        """What the work gives.

        Raises:
            EncoderLost: the process ended before that.
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
            raise EncoderLost("the process that encodes long texts ended in the middle of one") from None
        if failure is not None:
            raise failure
        return result

    def kill(self) -> None:
        """End it at once, whatever it is doing; `close` has to follow."""
        self._process.kill()

    def close(self) -> None:
        """End it and give back what it takes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not written has nobody to read it
                pipe.close()


def main() -> None:
    """Work until the standard input ends."""
    source = sys.stdin.buffer
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not come between
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
