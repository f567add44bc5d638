"""Worker processes of a grid: each runs cells one after the other, one thread each, and ends with the process that started it.

They are separate programs that read tasks from stdin and write messages to stdout, a line of JSON each, so that a script that
starts a grid needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

Message = dict[str, Any]
"""`event` is round (with round, seconds, accuracy), done, or failed (with error)."""

_END = 1.0
"""Seconds that workers are given to end before they are killed."""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    cell: str = ""
    unread: bytes = b""


class Workers:
    """So many workers; a context manager that ends them, at once when it is left by an error or by Ctrl-C.

    Args:
        log: file to which they append what they write to stderr. lock: a file descriptor that they hold open.
    """

    def __init__(self, count: int, log: Path, lock: int) -> None:
        self.count, self.log, self.lock = count, log, lock
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        for _ in range(self.count):
            self._start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for w in self._workers:
            if kind is not None:
                w.process.kill()
            with contextlib.suppress(BrokenPipeError):
                _pipe(w.process.stdin).close()
        for w in self._workers:
            try:
                w.process.wait(_END)
            except subprocess.TimeoutExpired:
                w.process.kill()
                w.process.wait()
            _pipe(w.process.stdout).close()
        self._selector.close()

    @property
    def busy(self) -> bool:
        """Whether any worker has a cell."""
        return any(w.cell for w in self._workers)

    @property
    def idle(self) -> bool:
        """Whether any worker has none."""
        return not all(w.cell for w in self._workers)

    def give(self, cell: str, task: dict[str, Any]) -> None:
        """Let an idle worker run a cell."""
        worker = next(w for w in self._workers if not w.cell)
        worker.cell = cell
        stdin = _pipe(worker.process.stdin)
        with contextlib.suppress(BrokenPipeError):  # it has died; `messages` says so
            stdin.write(json.dumps(task).encode() + b"\n")
            stdin.flush()

    def messages(self) -> Iterator[tuple[str, Message]]:
        """Wait for workers and give what they say, with the cell it is about; a worker that died is replaced, its cell failed."""
        for key, _ in self._selector.select():
            worker: _Worker = key.data
            text = os.read(key.fd, 1 << 16)
            if not text:
                yield from self._replaced(worker)
                continue
            *lines, worker.unread = (worker.unread + text).split(b"\n")
            for line in lines:
                message, cell = json.loads(line), worker.cell
                if message["event"] != "round":
                    worker.cell = ""
                yield cell, message

    def _replaced(self, worker: _Worker) -> Iterator[tuple[str, Message]]:
        stdout = _pipe(worker.process.stdout)
        self._selector.unregister(stdout)
        stdout.close()
        with contextlib.suppress(BrokenPipeError):
            _pipe(worker.process.stdin).close()
        status = worker.process.wait()
        self._workers.remove(worker)
        cause = f"was killed by signal {-status} (out of memory?)" if status < 0 else f"ended with status {status}"
        if not worker.cell:
            return  # nothing is waiting, or it would have a cell
        self._start()
        yield worker.cell, {"event": "failed", "error": f"the worker {cause}; see {self.log}"}

    def _start(self) -> None:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedveil.studies.grid.grid_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=[self.lock],
            )
        worker = _Worker(process)
        self._workers.append(worker)
        self._selector.register(_pipe(process.stdout), selectors.EVENT_READ, worker)


def begun(path: Path) -> bool:
    """Whether a run directory holds a run that may have released something; if not, it was killed at its start."""
    return any(
        (path / name).exists() for name in ("summary.json", "history.csv", "checkpoint", "ledger.sqlite", "ledger.sqlite-wal")
    )


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None
    return end
