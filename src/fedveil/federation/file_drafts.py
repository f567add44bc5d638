"""Files that belong together: written beside their places, synced at once, then renamed in an order."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, Self

from fedveil.federation.plain_state import sync
from fedveil.ledger.owner_only import owner_only
from fedveil.ledger.whole_files import DRAFT


class Drafts:
    """Files for their owner alone that get their names once all of them are on the disk; on failure no draft is left."""

    def __init__(self) -> None:
        self._open: list[IO[bytes]] = []
        self._unnamed: dict[Path, Path] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open:
            with suppress(OSError):
                file.close()
        for draft in self._unnamed.values():
            with suppress(OSError):
                draft.unlink()

    def write(self, path: Path, content: Iterable[bytes | memoryview]) -> None:
        """Write what shall be at `path`."""
        draft = self._unnamed[path] = path.with_name(path.name + DRAFT)
        file = open(draft, "wb", opener=owner_only)  # noqa: SIM115 (closed when all are named)
        self.sync_too(file)
        file.writelines(content)
        file.flush()

    def sync_too(self, file: IO[bytes]) -> None:
        """An open file that must be on the disk before the drafts get their names; it is closed with them."""
        self._open.append(file)

    def sync(self) -> None:
        """Wait until all that was written is on the disk, which takes little longer for several files at once than for one.

        Raises:
            OSError: one of them is not.
        """
        problems: list[BaseException] = []

        def synced(file: IO[bytes]) -> None:
            try:
                sync(file.fileno())
            except BaseException as problem:
                problems.append(problem)

        threads = [Thread(target=synced, args=(file,)) for file in self._open]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]

    def rename(self, path: Path) -> None:
        """Give the draft its name."""
        self._unnamed[path].replace(path)
        del self._unnamed[path]
