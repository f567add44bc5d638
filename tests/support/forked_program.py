"""A program as a process of its own, forked from that of the tests, which has imported torch; starting one takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import IO, Self

import pytest

from fedveil.cli.app import main

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a program")


def command(*words: object) -> Callable[[], None]:
    """`fedveil WORDS`, for `ForkedProgram`."""

    def called() -> None:
        sys.argv = ["fedveil", *map(str, words)]
        main()

    return called


class ForkedProgram:
    """What a function does in a process and session of its own, with a real pipe for what it writes to stdout and stderr.

    Args:
        act: ends as a program does, by returning, by SystemExit or by a signal.
    """

    def __init__(self, act: Callable[[], object]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            os.setsid()
            os._exit(_ended(act, writing))
        os.close(writing)
        self.output: IO[str] = os.fdopen(reading)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.output.close()

    def running(self) -> bool:
        """Whether it has not ended; asked before `status`."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def status(self) -> int:
        """Wait for its end: its exit status, or minus the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class StartedProgram(ForkedProgram):
    """The same of a program that is started anew, which imports torch."""

    def __init__(self, words: Sequence[object]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.pid, self.output = self.process.pid, self.process.stdout

    def status(self) -> int:
        """As above."""
        return self.process.wait()


def _ended(act: Callable[[], object], output: int) -> int:
    status = 1
    try:
        for number in (1, 2):
            os.dup2(output, number)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        act()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:
        sys.__excepthook__(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return status
