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
    """Do jobs until stdin ends, which happens at the latest when the process that started this one is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, who ends the workers
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        _send(answers, _do(jobs.get(), answers))


def _read(jobs: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    os._exit(0)  # a job may be cut off at any moment: what it finished is on disk


def _do(job: dict[str, Any], answers: IO[str]) -> Message:
    """Call the job's function, and say how it ended."""
    module, _, name = job["function"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        function(job["arguments"], lambda value: _send(answers, {"event": "progress", "value": value}))
    except FedveilError as error:
        return {"event": "failed", "error": str(error)}
    except Exception as error:  # a fault of one job, which must not end the others
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
