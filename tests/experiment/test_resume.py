"""Runs killed at random moments and resumed end with the bits of an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from fedveil.errors import ConfigError
from fedveil.experiment.config import Config, configure
from fedveil.experiment.run import run
from resumed_runs import CASES, case, entries, go, interrupted


def killed_after(configuration: Config, path: Path, resume: bool, seconds: float) -> bool:
    """Run in a forked process and kill it; whether it was still running."""
    pid = os.fork()
    if pid == 0:
        try:
            go(configuration, path, resume)
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def check_moments(tmp_path: Path, moments: int, cases: list[str]) -> None:
    draw, hits = random.Random(5), 0
    lasts: dict[Path, float] = {}  # seconds of the uninterrupted run
    for i in range(moments):
        configuration = case(cases[i % len(cases)])
        calm, path = tmp_path / f"calm{i % len(cases)}", tmp_path / f"run{i}"
        if not calm.exists():
            began = time.monotonic()
            go(configuration, calm)
            lasts[calm] = time.monotonic() - began
        hits += killed_after(configuration, path, False, draw.uniform(0, lasts[calm]))
        if not (path / "ledger.sqlite").exists():
            continue
        if not (path / "summary.json").exists():
            hits += killed_after(configuration, path, True, draw.uniform(0, lasts[calm] / 2))
        if not (path / "summary.json").exists():
            go(configuration, path, resume=True)
        assert (path / "model.safetensors").read_bytes() == (calm / "model.safetensors").read_bytes()
        plain = [[{**e.__dict__, "run": ""} for e in entries(p)] for p in (path, calm)]
        assert plain[0] == plain[1]
    assert hits > moments // 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its victims")
def test_killed_runs_resume_to_the_same_bits(tmp_path: Path) -> None:
    check_moments(tmp_path, 4, ["dp-fedavg server", "fedglp-adp", "fedanc", "banded-mf"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its victims")
def test_killed_runs_resume_to_the_same_bits_at_fifty_moments(tmp_path: Path) -> None:
    check_moments(tmp_path, 50, list(CASES))


def test_secret_noise_is_drawn_anew_and_charged_again(tmp_path: Path) -> None:
    configuration = case("dp-fedavg aggregate", training={"rounds": 4})
    configuration = configuration.model_copy(update={"run": configuration.run.model_copy(update={"seeded_noise": False})})
    interrupted(configuration, tmp_path / "a", 2)
    result = go(configuration, tmp_path / "a", resume=True)
    assert [e.round for e in entries(tmp_path / "a")] == [0, 1, 1, 2]
    assert "budget" in result.ended.lower()
    assert len(result.history) == 3


def test_another_configuration_is_refused_with_the_difference(tmp_path: Path) -> None:
    configuration = case("dp-fedavg aggregate", training={"rounds": 3})
    interrupted(configuration, tmp_path / "a", 2)
    other = case("dp-fedavg aggregate", training={"rounds": 5})
    with pytest.raises(ConfigError, match=r"training\.rounds was 3 and is 5"):
        go(other, tmp_path / "a", resume=True)
    moved = configuration.model_copy(update={"run": configuration.run.model_copy(update={"engine": "pool"})})
    assert len(go(moved, tmp_path / "a", resume=True).history) == 3
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["rounds"] == 3
    with pytest.raises(ConfigError, match="has ended"):
        go(configuration, tmp_path / "a", resume=True)
    with pytest.raises(ConfigError, match="holds no run"):
        go(configuration, tmp_path / "none", resume=True)


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the run directory"):
        run(configure(training={"rounds": 1}), tmp_path / "file" / "run")
