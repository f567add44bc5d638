"""Execution of code in a forked child that returns plain values, so that its side effects disappear.

The child has one thread, since library threads do not survive a fork. It discards output, since a progress bar of the parent may
hold a lock. It has its own process group, which is killed with it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import select
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import torch

from fedveil.errors import ConfigError, DataError, FedveilError, frames_of, one_line, users_place
from fedveil.federation.isolated import can_fork, end, ending, in_this_child, started
from fedveil.release.noise import Randomness

Stage = Callable[[str], None]
"""Callback that names the next step, in words that complete "while"."""

_SILENT = 120.0
"""Seconds without a named step after which a child counts as hanging."""
_POLL = 0.2
_KINDS = {kind.__name__: kind for kind in (ConfigError, DataError)}


class ChildHung(FedveilError):
    """Raised for a child that reported nothing for too long, and was killed."""


def in_child(act: Callable[[Stage], Any], what: str, silent: float = _SILENT) -> Any:
    """Run `act` in a child process and return its plain JSON values; run it in this process if no child can be forked.

    Args:
        act: may only change objects that it made itself, in case it runs in this process. what: names it in errors.

    Raises:
        FedveilError: raised by `act`, with the place in the user's code that caused it; or another error's text; or the child was
            killed, or hung.
    """
    if not can_fork():
        return _in_this_process(act, what)
    reading, writing = os.pipe()

    parent = os.getpid()

    def told() -> None:
        os.close(reading)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        logging.disable()
        _tell(writing, _outcome(act, what, lambda stage: _tell(writing, {"stage": stage})))

    child = started(lambda: in_this_child(told, parent))
    os.close(writing)
    try:
        return _answer(reading, child, what, silent)
    finally:
        os.close(reading)
        end(child)


# --- the child --------------------------------------------------------------------------------------------------------


def _outcome(act: Callable[[Stage], Any], what: str, tell: Stage) -> dict[str, Any]:
    stages = [""]

    def stage(words: str) -> None:
        stages.append(words)
        tell(words)

    try:
        return {"value": act(stage)}
    except BaseException as error:
        words = "".join(traceback.format_exception(error))
        return {"error": [type(error).__name__, _explained(error, what, stages[-1]), words]}


def _explained(error: BaseException, what: str, stage: str) -> str:
    """Describe an error in one line: its text, and its place in the user's code."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    place = users_place(frames_of(cause))
    at = f" (at {place})" if place else ""
    if isinstance(error, FedveilError):
        return str(error) if at in str(error) else f"{error}{at}"
    try:
        words = one_line(str(error))
    except Exception:  # the exception's own text fails, too
        words = ""
    return f"{what} failed {stage}: {type(error).__name__}{f': {words}' if words else ''}{at}"


def _tell(writing: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(writing, data) :]


# --- the parent -------------------------------------------------------------------------------------------------------


def _answer(reading: int, child: int, what: str, silent: float) -> Any:
    stage, waiting = "as it began", b""
    until, poll = time.monotonic() + silent, select.poll()  # poll, unlike select, takes descriptors of any number
    poll.register(reading, select.POLLIN)
    while True:
        ready = bool(poll.poll(1000 * min(_POLL, max(until - time.monotonic(), 0.0))))
        part = os.read(reading, 1 << 16) if ready else None
        *lines, waiting = (waiting + (part or b"")).split(b"\n")
        for line in lines:
            message, until = json.loads(line), time.monotonic() + silent
            if "stage" not in message:
                return _value(message)
            stage = message["stage"]
        if ready and part:
            continue
        if ended := _ended(child):
            raise FedveilError(f"{what} failed {stage}: its process {ended}; nothing was released")
        if part == b"":  # it is about to end, or has closed the pipe
            time.sleep(_POLL)  # it is about to end, or closed what it should answer by
        if time.monotonic() > until:
            raise ChildHung(
                f"{what} hung {stage}: its process said nothing for {silent:g} s, and was ended; nothing was released. Look for "
                f"a loop without an end, or a lock, in the code of the model, the task or the method"
            )


def _value(message: dict[str, Any]) -> Any:
    if "value" in message:
        return message["value"]
    kind, words, trace = message["error"]
    error = _KINDS.get(kind, ConfigError)(words)
    error.add_note(trace)
    raise error


def _ended(child: int) -> str:
    """Describe how the child ended, or return an empty string while it is alive."""
    try:
        pid, status = os.waitpid(child, os.WNOHANG)
    except ChildProcessError:
        return "ended"
    if not pid:
        return ""
    return ending(status)


# --- where no child can be forked -------------------------------------------------------------------------------------


def _in_this_process(act: Callable[[Stage], Any], what: str) -> Any:
    """Imitate a child as far as possible: restore random generators, and discard output."""
    generators = Randomness(0).forward(torch.device("cpu"), "rehearsal")
    with generators, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        message = _outcome(act, what, lambda stage: None)
    return _value(json.loads(json.dumps(message)))
