"""Output that nobody need read to the end."""

from __future__ import annotations

import io
import os
from typing import TextIO, cast


def patient(stream: TextIO | None) -> TextIO:
    """The stream, made to outlive its reader and to write what its encoding lacks as a question mark; none was closed before."""
    if isinstance(stream, io.TextIOWrapper) and (stream.errors == "strict" or stream.encoding.lower() != "utf-8"):
        stream.reconfigure(errors="replace")
    return cast(TextIO, _Patient(stream or open(os.devnull, "w", encoding="utf-8")))


def standard_descriptors() -> None:
    """Open those of input, output and errors that were closed (`>&-`): the next file opened would get their text."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


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
        except OSError as error:
            raise OSError(error.errno, error.strerror, "what this program prints") from None

    def flush(self) -> None:
        """Flush, or drop what nobody reads."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._to_nobody()
        except OSError as error:
            raise OSError(error.errno, error.strerror, "what this program prints") from None

    def _to_nobody(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
