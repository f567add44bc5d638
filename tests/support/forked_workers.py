"""Workers of studies forked from the tests' own process, which has imported torch already; else each start takes seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import IO

from fedveil.studies.worker_program import main


class ForkedWorker:
    """What `subprocess.Popen` gives, as far as the worker pool uses it; `command` is not run, but the function it would call."""

    def __init__(
        self, command: list[str], *, stdin: int, stdout: int, stderr: IO[bytes], env: Mapping[str, str], pass_fds: Sequence[int]
    ) -> None:
        assert command[1:] == ["-m", "fedveil.studies.worker_program"]
        assert stdin == stdout == subprocess.PIPE
        (jobs, ours), (theirs, answers) = os.pipe(), os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                become(jobs, answers, stderr.fileno(), pass_fds)
                os.environ.update(env)
                main()
            finally:
                os._exit(1)
        os.close(jobs)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(ours, "wb"), os.fdopen(theirs, "rb")

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.001)
        return code


def become(stdin: int, stdout: int, stderr: int, kept: Sequence[int]) -> None:
    """Exactly these files, as a program that was started."""
    for number, file in enumerate((stdin, stdout, stderr)):
        os.dup2(file, number)
    first = 3
    for one in sorted(kept):
        os.closerange(first, one)
        first = one + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")


FORKING = SimpleNamespace(Popen=ForkedWorker, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
"""In the place of the module `subprocess` in the worker pool."""
