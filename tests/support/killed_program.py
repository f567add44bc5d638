"""`python killed_program.py WHO POINT NUMBER fedveil-arguments...`: fedveil, which kills itself with SIGKILL at that point.

It gets there for the NUMBER-th time (from 1); 0 is never. WHO is client, server, masked client or masked server.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest

from fedveil.cli.app import main
from kill_points import BY_PROGRAM, kill_at


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    who, point, number, *arguments = sys.argv[1:]
    if int(number):
        kill_at(pytest.MonkeyPatch(), BY_PROGRAM[who][point], {int(number)}, kill)
    sys.argv = ["fedveil", *arguments]
    main()
