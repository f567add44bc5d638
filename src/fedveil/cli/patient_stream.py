"""Output that nobody need read to the end."""

from __future__ import annotations

import os
from typing import TextIO, cast


def patient(stream: TextIO) -> TextIO:
    """The stream, made to outlive its reader."""
    return cast(TextIO, _Patient(stream))


class _Patient:
    """A stream that goes on silently once its reader has gone, as after `fedveil run ... | head -1`: a run must not end by it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        """Write, or drop what nobody reads."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._to_nobody()
            return len(text)

    def flush(self) -> None:
        """Flush, or drop what nobody reads."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._to_nobody()

    def _to_nobody(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
