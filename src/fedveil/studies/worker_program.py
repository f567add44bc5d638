"""The program of one worker: `python -m fedveil.studies.worker_program`; it ends when its stdin does."""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from typing import IO, Any

from fedveil.errors import FedveilError
from fedveil.studies.worker_pool import Message


def main() -> None:
    """Run jobs until stdin ends, at the latest when the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the workers
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the output of libraries goes to the log
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        _send(answers, _do(jobs.get(), answers))


def _read(jobs: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)  # safe at any moment, since finished work is on disk


def _do(job: dict[str, Any], answers: IO[str]) -> Message:
    """Call the job's function and send a message about its end."""
    module, _, name = job["function"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        function(job["arguments"], lambda value: _send(answers, {"event": "progress", "value": value}))
    except FedveilError as error:
        return {"event": "failed", "error": str(error)}
    except Exception as error:  # an error of one job must not end the others
        traceback.print_exc()
        return {"event": "failed", "error": f"{type(error).__name__}: {error}"}
    return {"event": "done"}


def _send(answers: IO[str], message: Message) -> None:
    try:
        answers.write(json.dumps(message) + "\n")
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
