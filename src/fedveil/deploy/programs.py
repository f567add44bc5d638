"""Flower's programs as child processes, with telemetry and update checks off."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from fedveil.errors import ConfigError, FedveilError

QUIET = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Environment variables, set before any import of Flower and for each of its processes."""


def require_flower() -> None:
    """Prepare the environment for Flower and check that it can be imported.

    Raises:
        ConfigError: it is not installed.
    """
    os.environ.update(QUIET)
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise ConfigError("this needs Flower, which is not installed: pip install 'fedveil[train,flower]'") from None


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables for the duration of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_PR_SET_PDEATHSIG = 1
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOG = 10 * 2**20
"""Size in bytes at which a program's log is begun anew."""
_UP = 120.0
"""Seconds that a program gets to start answering."""


class Program:
    """One program of Flower.

    Args:
        command: a program next to the Python executable, and its arguments. home: for Flower's files. log: for its output.
        name: for messages; by default the program's. memory: limit in bytes (Linux), or None.
    """

    def __init__(self, command: Sequence[str], home: Path, log: Path, name: str = "", memory: int | None = None) -> None:
        self.command, self.home, self.log, self.name = list(command), home, log, name or command[0]
        self.memory = memory
        self.process: subprocess.Popen[bytes] | None = None
        self._file: IO[bytes] | None = None
        self._begun = 0

    def start(self) -> None:
        """Start the program."""
        program = Path(sys.executable).with_name(self.command[0])
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = {**os.environ, **QUIET, "FLWR_HOME": str(self.home), "PATH": path}
        if self._file is None:
            self.log.touch(mode=0o600)
            self._file = self.log.open("ab")
        self._begun = len(self.log.read_text(encoding="utf-8", errors="replace"))
        self.process = subprocess.Popen(
            [str(program), *self.command[1:]],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=ends_with_parent(self.memory),
        )

    def rotate(self) -> None:
        """Begin the log anew if it is long; the last ones are LOG.1 and LOG.2."""
        if self.log.stat().st_size < _LOG:
            return
        first, second = (self.log.with_name(f"{self.log.name}.{number}") for number in (1, 2))
        if first.exists():
            first.replace(second)
        shutil.copy(self.log, first)  # with its mode; the program goes on writing at the end of its own file
        os.truncate(self.log, 0)
        self._begun = 0

    @property
    def running(self) -> bool:
        """Return whether the program has not ended."""
        return self.process is not None and self.process.poll() is None

    def wait_for(self, port: int) -> None:
        """Wait until the program answers at that port of this machine.

        Raises:
            FedveilError: it ended, or did not start in time.
        """
        end = time.monotonic() + _UP
        while self.running and time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            time.sleep(0.1)
        raise FedveilError(f"{self.name} did not come up; its log is {self.log}: {self.why()}")

    def why(self) -> str:
        """Return in one line why the program ended, from its own message or else the end of its output."""
        with suppress(OSError):
            output = _COLOUR.sub("", self.log.read_text(encoding="utf-8", errors="replace")[self._begun :])
            explained = re.search(r"Exit Code: (\d+)(.*?)(?:For more information|$)", output, re.DOTALL)
            if explained:
                return f"exit {explained[1]}, {' '.join(explained[2].split())}"
            return " | ".join(line.strip() for line in output.splitlines()[-3:])
        return ""

    def stop(self) -> None:
        """End the program."""
        if self.process is not None:
            if self.running:
                self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._file is not None:
            self._file.close()


def require_free(host: str, port: int, patience: float = 5.0) -> None:
    """Wait a moment for a free port on this machine: a killed program may still hold it.

    Raises:
        FedveilError: another program has it.
    """
    end = time.monotonic() + patience
    while True:
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
            return
        except OSError as problem:
            if time.monotonic() >= end:
                raise FedveilError(
                    f"port {port} of this machine cannot be used ({problem.strerror}): end what answers there, such as another "
                    f"fedveil serve, or make a network for another port (fedveil net init --port)"
                ) from None
        time.sleep(0.1)


@contextmanager
def running(program: Program, tell: Callable[[str], None], pause: float) -> Iterator[Program]:
    """Run a program for the duration of the block, and restart it if it ends before.

    Args:
        tell: called with a line when that happens. pause: seconds before the restart.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            with suppress(OSError):  # a full disk
                program.rotate()
            if not program.running:
                tell(f"{program.name} has ended and is started again: {program.why()}")
                if not ended.wait(pause):
                    try:
                        program.start()
                    except OSError as problem:  # out of memory or disk space: it is retried
                        tell(f"{program.name} cannot be started: {problem}")

    program.start()
    watcher = threading.Thread(target=watch, daemon=True)
    try:
        watcher.start()
        yield program
    finally:
        ended.set()
        if watcher.is_alive():
            watcher.join()
        program.stop()


@contextmanager
def ended_by_signal() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does, so that its children end, too; unless the program already handles it."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def ends_with_parent(memory: int | None = None) -> Callable[[], None] | None:
    """Return the first call of a child of this thread, which lets it end with the thread and limits its memory."""
    return partial(_confine, memory) if sys.platform.startswith("linux") else None


def _confine(memory: int | None) -> None:
    """Ask the system, in the child, to end it when its parent ends, however that happens, and to limit its memory."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    limit_memory(memory)


def limit_memory(memory: int | None) -> None:
    """Limit this process's own memory, and that of its later children, to so many bytes (Linux); None leaves it as it is."""
    if memory is not None and sys.platform.startswith("linux"):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
