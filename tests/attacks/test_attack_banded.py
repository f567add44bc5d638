"""Attacks on runs with correlated noise: each attempt is a release of its own, and the run's secret state is only read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil.attacks.attack_options import AttackOptions
from fedveil.attacks.audit_run import audit_canaries
from fedveil.attacks.interception import interceptions
from fedveil.attacks.snapshot import Snapshot, snapshot_of
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config, parse
from fedveil.experiment.resolve import opened
from fedveil.experiment.run import run
from fedveil.mechanism.mechanisms import STATE_FILE, NoiseMemory


def config(noise: float) -> Config:
    return parse(
        {
            "data": {"name": "digits", "partition": {"kind": "iid", "clients": 8}},
            "model": {"name": "linear"},
            "method": {"name": "banded-mf", "clip": 0.5, "separation": 2},
            "training": {"rounds": 3, "clients_per_round": 4, "sampling": "fixed", "optimizer": {"lr": 0.1}},
            "privacy": {"noise_multiplier": noise, "delta": 1e-3, "view": "aggregate"},
            "run": {"engine": "inline"},
        }
    )


def attempts(snapshot: Snapshot, count: int = 3) -> list[tuple[torch.Tensor, float]]:
    """What one who knows all others reads of each victim, and the norm of that victim's clipped update."""
    found: list[Any] = [i.upload for i in interceptions(snapshot, AttackOptions(knows=("others",), seed=1), count, 4)]
    return [(torch.cat([part.flatten() for part in upload.tensors.values()]), upload.signal_norm) for upload in found]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_each_attempt_reads_its_own_release_and_leaves_the_state_alone(tmp_path: Path, elsewhere: Path) -> None:
    """Who knows all others reads off one client's update, where noise is next to nothing: another one for each victim."""
    configuration = config(1e-6)
    path = run(configuration, tmp_path / "run").path
    before = (path / STATE_FILE).read_bytes()
    with pytest.raises(ConfigError, match="charged for the rounds 0 to 2, round 3 cannot leave"):
        attempts(snapshot_of(*opened(configuration), path, last=True, seed=0))
    snapshot = snapshot_of(*opened(configuration), path, seed=0)
    read = attempts(snapshot)
    assert len({norm for _, norm in read}) == 3
    for update, norm in read:
        assert float(update.norm()) == pytest.approx(norm, rel=1e-3)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(read, attempts(snapshot), strict=True))
    assert (path / STATE_FILE).read_bytes() == before
    assert int(NoiseMemory(path / STATE_FILE).read()["round"][0]) == 2
    assert list(elsewhere.iterdir()) == []


@pytest.mark.heavy
def test_canaries_leave_no_state_behind(elsewhere: Path) -> None:
    for _ in range(2):  # the second run begins anew
        assert [audit.n for audit in audit_canaries(*opened(config(1.0)), 4)] == [4, 4]
    assert list(elsewhere.iterdir()) == []
