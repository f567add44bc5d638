"""The pool of studies: jobs by the name of their function, faults of one job, what is printed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedveil.studies import worker_pool
from fedveil.studies.worker_pool import Job, Message, Workers


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "subprocess", subprocess)


def outcomes(jobs: Sequence[Job], log: Path, count: int = 1) -> list[tuple[str, Message]]:
    waiting = iter(jobs)
    with Workers(count, log) as workers:
        return list(workers.run(lambda: next(waiting, None)))


def test_a_job_is_a_function_by_name_and_its_fault_ends_no_other(tmp_path: Path) -> None:
    found = outcomes(
        [
            Job("says", "builtins:print", {"word": "heard in the log"}),
            Job("absent", "builtins:no_such_function", {}),
            Job("refused", "fedveil.experiment.config_files:load_config", {"not": "a path"}),
            Job("again", "builtins:print", {}),
        ],
        tmp_path / "log",
    )
    assert [(name, message["event"]) for name, message in found] == [
        *(("says", "started"), ("says", "done"), ("absent", "started"), ("absent", "failed")),
        *(("refused", "started"), ("refused", "failed"), ("again", "started"), ("again", "done")),
    ]
    errors = {name: message["error"] for name, message in found if "error" in message}
    assert errors["absent"].startswith("AttributeError: ")
    assert errors["refused"].startswith("TypeError: ")
    text = (tmp_path / "log").read_text()
    assert "heard in the log" in text
    assert "Traceback" in text


def test_as_many_jobs_run_as_there_are_workers(tmp_path: Path) -> None:
    found = outcomes([Job(str(i), "builtins:print", {}) for i in range(4)], tmp_path / "log", count=2)
    assert [message["event"] for _, message in found][:2] == ["started", "started"]
    assert sorted(name for name, message in found if message["event"] == "done") == ["0", "1", "2", "3"]


def test_leaving_by_an_error_ends_the_workers_at_once(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Workers(2, tmp_path / "log") as workers:
        pids = [worker.process.pid for worker in workers._workers]
        raise ZeroDivisionError
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
