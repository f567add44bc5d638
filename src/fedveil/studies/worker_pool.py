"""Worker processes of studies: each calls functions one after the other, one thread each, and ends with its parent process.

They are separate programs that read jobs from stdin and write messages to stdout, one line of JSON each, so that a script that
starts a study needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

Message = dict[str, Any]
"""A message; `event` is started, progress (with value), done, or failed (with error)."""

_END = 1.0
"""Seconds for workers to end before they are killed."""


@dataclass(frozen=True)
class Job:
    """A function to call in a worker.

    Args:
        name: of the job, which is part of its messages. function: `module:function`, called as function(arguments, report), where
            report(value) sends a progress message. arguments, value: JSON values.
    """

    name: str
    function: str
    arguments: dict[str, Any]


@dataclass
class _Process:
    process: subprocess.Popen[bytes]
    job: str = ""
    unread: bytes = b""


class Workers:
    """A context manager for a number of workers, which ends them at once after an error or Ctrl-C.

    Args:
        log: file to which workers append their output. lock: a file descriptor that they keep open.
    """

    def __init__(self, count: int, log: Path, lock: int | None = None) -> None:
        self.count, self.log, self.lock = count, log, lock
        self._workers: list[_Process] = []
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

    def run(self, next_job: Callable[[], Job | None]) -> Iterator[tuple[str, Message]]:
        """Run all jobs, and yield each message with the name of its job.

        Args:
            next_job: called when a worker is idle; returns None if there are no more jobs.
        """
        while True:
            for worker in [w for w in self._workers if not w.job]:
                job = next_job()
                if job is None:
                    break
                self._give(worker, job)
                yield job.name, {"event": "started"}
            if not any(w.job for w in self._workers):
                return
            yield from self._messages()

    def _give(self, worker: _Process, job: Job) -> None:
        worker.job = job.name
        stdin = _pipe(worker.process.stdin)
        with contextlib.suppress(BrokenPipeError):  # the worker died, which `_messages` reports
            stdin.write(json.dumps({"function": job.function, "arguments": job.arguments}).encode() + b"\n")
            stdin.flush()

    def _messages(self) -> Iterator[tuple[str, Message]]:
        """Wait for workers and yield their messages; a dead worker is replaced, and its job fails."""
        for key, _ in self._selector.select():
            worker: _Process = key.data
            text = os.read(key.fd, 1 << 16)
            if not text:
                yield from self._replaced(worker)
                continue
            *lines, worker.unread = (worker.unread + text).split(b"\n")
            for line in lines:
                message, job = json.loads(line), worker.job
                if message["event"] != "progress":
                    worker.job = ""
                yield job, message

    def _replaced(self, worker: _Process) -> Iterator[tuple[str, Message]]:
        stdout = _pipe(worker.process.stdout)
        self._selector.unregister(stdout)
        stdout.close()
        with contextlib.suppress(BrokenPipeError):
            _pipe(worker.process.stdin).close()
        status = worker.process.wait()
        self._workers.remove(worker)
        cause = f"was killed by signal {-status} (out of memory?)" if status < 0 else f"ended with status {status}"
        if not worker.job:
            return  # no job is waiting, since an idle worker gets one at once
        self._start()
        yield worker.job, {"event": "failed", "error": f"the worker {cause}; see {self.log}"}

    def _start(self) -> None:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedveil.studies.worker_program"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=[] if self.lock is None else [self.lock],
            )
        worker = _Process(process)
        self._workers.append(worker)
        self._selector.register(_pipe(process.stdout), selectors.EVENT_READ, worker)


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None
    return end
