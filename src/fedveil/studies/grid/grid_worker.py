"""The program of one worker of a grid: `python -m fedveil.studies.grid.grid_worker`; it ends when its stdin does."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, Any

from fedveil.errors import FedveilError
from fedveil.studies.grid.worker_pool import Message, begun


def main() -> None:
    """Run cells until stdin ends, which happens at the latest when the process that started this one is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, who ends the workers
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    tasks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(tasks,), daemon=True).start()
    while True:
        _tell(answers, _run(tasks.get(), answers))


def _read(tasks: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        tasks.put(json.loads(line))
    os._exit(0)  # a run may be cut off at any moment: it resumes


def _run(task: dict[str, Any], answers: IO[str]) -> Message:
    """Run a cell, or go on with it, and tell how it ended."""
    from fedveil.configuration.config import Config
    from fedveil.run.run import run

    path = Path(task["path"])

    def on_round(record: dict[str, Any]) -> None:
        told = {"event": "round", "round": record["round"], "seconds": record["seconds"]}
        _tell(answers, {**told, "accuracy": record.get("test_accuracy")})

    try:
        resume = begun(path)
        if path.exists() and not resume:
            shutil.rmtree(path)
        run(Config.model_validate(task["config"]), path, on_round, resume=resume)
    except FedveilError as error:
        return {"event": "failed", "error": str(error)}
    except Exception as error:  # a fault of one cell, which must not end the others
        traceback.print_exc()
        return {"event": "failed", "error": f"{type(error).__name__}: {error}"}
    return {"event": "done"}


def _tell(answers: IO[str], message: Message) -> None:
    try:
        answers.write(json.dumps(message) + "\n")
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
