"""A disk that is full at one chosen moment: the n-th time that this process writes, syncs, renames or makes something there."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch


class FullDisk:
    """Within the context, calls that need room below `folder` are counted, and the one with the number `fails` has none.

    SQLite writes by itself and is not seen; limits on the size of files and tiny file systems test it.
    """

    def __init__(self, folder: Path, fails: int | None = None) -> None:
        self.folder, self.fails, self.points = str(folder), fails, list[str]()
        self._stack, self._one_at_a_time = ExitStack(), Lock()

    def __enter__(self) -> FullDisk:
        for name in ("fsync", "pwrite", "posix_fallocate"):
            self._stack.enter_context(patch.object(os, name, self._of_descriptor(name, getattr(os, name))))
        for name in ("replace", "rename", "link", "mkdir"):
            self._stack.enter_context(patch.object(os, name, self._of_path(name, getattr(os, name))))
        opened = self._opened(builtins.open)
        self._stack.enter_context(patch.object(builtins, "open", opened))
        self._stack.enter_context(patch.object(io, "open", opened))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def full(self, what: str, path: str) -> bool:
        """Note a call; whether it is the one that fails."""
        if path != self.folder and not path.startswith(f"{self.folder}/"):
            return False
        with self._one_at_a_time:  # files that belong together are synced by several threads
            self.points.append(f"{what} {os.path.relpath(path, self.folder)}")
            return len(self.points) - 1 == self.fails

    def _of_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(descriptor: int, *more: Any) -> Any:
            if self.full(name, path := os.readlink(f"/proc/self/fd/{descriptor}")):
                raise no_room(path)
            return real(descriptor, *more)

        return called

    def _of_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *more: Any, **options: Any) -> Any:
            if not (name == "mkdir" and os.path.isdir(path)) and self.full(name, os.fspath(path)):
                raise no_room(os.fspath(path))
            return real(path, *more, **options)

        return called

    def _opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
            made = real(file, mode, *more, **options)
            writes = set(mode) & set("wax+") and isinstance(file, str | os.PathLike)
            return _NoRoom(made) if writes and self.full("write", os.fspath(file)) else made

        return opened


class _NoRoom:
    """A file that was made, and takes nothing."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, content: Any) -> int:
        raise no_room(self._file.name)

    def fileno(self) -> int:
        """None, by which the system could copy past `write`."""
        raise no_room(self._file.name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __enter__(self) -> _NoRoom:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def no_room(path: str) -> OSError:
    """What the system says then."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class NoRoomForStates(FullDisk):
    """A disk of which nothing is left for what a client keeps of a round."""

    def full(self, what: str, path: str) -> bool:
        """Whether it is a new file that is written."""
        inside = path.startswith(f"{self.folder}/")
        return inside and what in ("write", "posix_fallocate") and "states" in path
