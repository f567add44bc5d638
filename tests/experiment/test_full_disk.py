"""The disk is full at each single moment at which a run writes: one line, and what goes on afterwards ends with the same bits."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from fedveil.errors import FedveilError
from fedveil.experiment.config import Config
from full_disk import FullDisk
from resumed_runs import case, go, same_end

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="follows descriptors in /proc")


def inline(name: str) -> Config:
    """A run of two rounds of one of the cases, in one process."""
    configuration = case(name, training={"rounds": 2})
    return configuration.model_copy(update={"run": configuration.run.model_copy(update={"engine": "inline"})})


def points_of(configuration: Config, path: Path) -> list[str]:
    """Every moment at which an undisturbed run needs room, by what it does with which file."""
    with FullDisk(path) as disk:
        go(configuration, path)
    return disk.points


def survives(configuration: Config, path: Path, number: int, calm: Path) -> None:
    """Whether the run says in a line what happened at this point, and ends as the calm one when there is room again."""
    with FullDisk(path, fails=number) as disk, pytest.raises(FedveilError, match="No space left on device") as error:
        go(configuration, path)
    assert len(disk.points) > number
    assert "\n" not in str(error.value), disk.points[number]
    go(configuration, path, resume=(path / "ledger.sqlite").exists())
    same_end(path, calm)


def test_every_kind_of_file_is_among_the_points(tmp_path: Path) -> None:
    points = " ".join(points_of(inline("aldp-fl published"), tmp_path / "a"))
    for name in (
        *(
            "versions.json",
            "config.toml",
            "statement.json",
            "statement.md",
            "data.json",
            "private/salt",
            "private/partition.json",
        ),
        *("ledger.sqlite-head", "checkpoint/head.json", "checkpoint/journal.jsonl", "checkpoint/global-", "checkpoint/states-"),
        *(
            "history.csv",
            "private/history.csv",
            "private/layers.csv",
            "model.safetensors",
            "private/summary.json",
            "summary.json",
        ),
    ):
        assert name in points, f"{name} not in {points}"


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["dp-fedavg aggregate", "aldp-fl published"])
def test_a_full_disk_at_some_points(name: str, tmp_path: Path) -> None:
    configuration = inline(name)
    points = points_of(configuration, tmp_path / "calm")
    for number in range(0, len(points), 11):
        survives(configuration, tmp_path / str(number), number, tmp_path / "calm")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp-fedavg aggregate", "aldp-fl published", "fedglp-adp", "banded-mf"])
def test_a_full_disk_at_every_point(name: str, tmp_path: Path) -> None:
    configuration = inline(name)
    for number in range(len(points_of(configuration, tmp_path / "calm"))):
        survives(configuration, tmp_path / str(number), number, tmp_path / "calm")


@pytest.mark.parametrize("seconds", [0.005, pytest.param(0.3, marks=pytest.mark.slow)])
def test_a_disk_that_syncs_slowly(seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration, real, waited = inline("aldp-fl published"), os.fsync, []
    go(configuration, tmp_path / "calm")

    def slow(descriptor: int) -> None:
        waited.append(1)
        time.sleep(seconds)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    go(configuration, tmp_path / "slow")
    assert len(waited) > 10
    same_end(tmp_path / "slow", tmp_path / "calm")
