"""What a run computes from private data lies in its folder `private`, for the owner alone, and nowhere else."""

from __future__ import annotations

import csv
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.data.partition import partition
from fedveil.experiment import run_directory as rundir
from fedveil.experiment.config import Config, configure
from fedveil.experiment.recorded_run import read_run
from fedveil.experiment.run import run
from fedveil.report.figures import plot_curves, plot_partition, plot_run
from fedveil.report.report import page_values
from fedveil.tasks.classification import Classification

AGGREGATE = {"epsilon": 8.0, "delta": 0.01, "view": "aggregate"}
SERVER = AGGREGATE | {"view": "server"}
MODELS = {"test_loss", "update_norm"} | {f"test_{m.name}" for m in Classification.metrics}
PLANS = {"noise_norm", "clip", "coordinates", "cumulative_noise_norm"}
COUNTS = {"participants", "uplink_bytes"}
PUBLIC = {"round", "epsilon_spent", *MODELS, *PLANS, *COUNTS}


def config(privacy: dict[str, Any], method: str = "dp-fedavg", training: dict[str, Any] | None = None, **more: Any) -> Config:
    return configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 6}, "client_test_fraction": 0.2},
        model={"name": "linear"},
        method={"name": method, **more},
        training={"rounds": 2, **(training or {})},
        privacy=privacy,
        run={"engine": "inline", "seeded_noise": True},
    )


def headers(table: Path) -> set[str]:
    with table.open(newline="") as file:
        return set(next(csv.reader(file)))


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


POISSON = {"clients_per_round": 3, "sampling": "poisson"}
CASES = {
    "server": (config(SERVER), PUBLIC),
    "server by poisson": (config(SERVER, training=POISSON), PUBLIC),
    "aggregate": (config(AGGREGATE), PUBLIC),
    "aggregate by poisson": (config(AGGREGATE, training=POISSON), PUBLIC - COUNTS),
    "final": (config(AGGREGATE | {"view": "final"}), {"round", "epsilon_spent", *COUNTS}),
    "final by poisson": (config(AGGREGATE | {"view": "final"}, training=POISSON), {"round", "epsilon_spent"}),
    "a policy that releases its figures": (config(SERVER, "fedanc"), PUBLIC | {"beta", "gamma", "controller_beta", "mu2_spent"}),
    "a policy that reads private data": (
        config(SERVER, "aldp-fl", variant="published"),
        PUBLIC - PLANS - {"uplink_bytes", "epsilon_spent"},
    ),
    "local noise, its amount by who took part": (
        config(AGGREGATE | {"unit": "record", "delta": 1e-5}, training=POISSON | {"local": "dp-sgd"}),
        PUBLIC - COUNTS - {"clip", "noise_norm", "cumulative_noise_norm"} | {"example_clip", "expected_batch"},
    ),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_the_public_history_has_public_columns_alone(name: str, tmp_path: Path) -> None:
    configuration, public = CASES[name]
    result = run(configuration, tmp_path / "run")
    assert headers(result.path / "history.csv") == public
    whole = {k for row in result.history for k, v in row.items() if not isinstance(v, list | dict)}
    private = headers(result.path / "private" / "history.csv")
    assert private == {"round", *(whole - public)}
    assert {"train_loss", "failed", "seconds"} <= private
    shown = read_run(result.path)
    assert {k: v for k, v in shown.history[-1].items() if v is not None} == {k: result.history[-1][k] for k in whole}
    assert {k for k in whole if not shown.declared[k].public} == whole - public
    summary, private_summary = (json.loads((f / "summary.json").read_text()) for f in (result.path, result.path / "private"))
    assert set(summary["final"]) == public | {k for k in whole if k.startswith("test_")}, "the last model is always released"
    assert set(private_summary["final"]) == whole
    assert "seconds" not in summary
    assert private_summary["seconds"] > 0


def test_a_run_directory_without_its_private_part_is_reported_and_plotted_as_far_as_it_goes(tmp_path: Path) -> None:
    result = run(config(AGGREGATE, training=POISSON), tmp_path / "run")
    whole = read_run(result.path)
    assert page_values([whole])["groups"][0]["clients"] is not None
    shutil.rmtree(result.path / "private")
    shown = read_run(result.path)
    assert [shown.clients, shown.partition, shown.failures, shown.participants] == [[], None, [], []]
    assert {k for row in shown.history for k in row} == PUBLIC - COUNTS
    (group,) = page_values([shown])["groups"]
    assert group["clients"] is group["partition"] is None
    assert "private" not in page_values([shown])["charts"]["private"]
    assert plot_run(result.path, out=tmp_path / "plot.png").is_file()


def test_what_is_private_is_for_its_owner_alone_from_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is synced before it gets its name, so its mode is looked at there, and again at the end."""
    synced: list[tuple[str, int]] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), stat.S_IMODE(os.fstat(descriptor).st_mode)))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    umask = os.umask(0)
    try:
        fixed = {"clients_per_round": 2, "sampling": "fixed"}
        path = run(config(AGGREGATE, "banded-mf", fixed, band=2, separation=2), tmp_path / "run").path
    finally:
        os.umask(umask)
    secret = [path / "private", path / "checkpoint"]
    files = [file for folder in secret for file in folder.iterdir()]
    assert len(files) > 5
    assert {mode(folder) for folder in secret} == {"0o700"}
    assert {mode(file) for file in (*files, *path.glob("ledger.sqlite*"), *path.glob("noise-state*"))} == {"0o600"}
    private = [bits for name, bits in synced if "/private/" in name or "/checkpoint/" in name or "noise-state" in name]
    assert len(private) > 10
    assert set(private) == {0o600}
    assert mode(path / "history.csv") == mode(path / "statement.json") == "0o666", "the others follow the umask"


def test_a_picture_of_private_figures_is_for_its_owner_alone(tmp_path: Path) -> None:
    result = run(config(AGGREGATE | {"view": "final"}), tmp_path / "final")
    curves = [plot_curves(result.history, result.columns, tmp_path / "final.png")]
    result = run(config(AGGREGATE), tmp_path / "run")
    shown = [plot_curves(result.history, result.columns, tmp_path / "curves.png"), plot_run(result.path, ["accuracy"])]
    curves += [plot_run(result.path, what) for what in (None, ["loss"], ["failed"])]
    labels = np.arange(60) % 3
    plot_partition(partition("iid", labels, clients=6, seed=0), labels, 3, tmp_path / "partition.png")
    assert {mode(file) for file in (*curves, tmp_path / "partition.png")} == {"0o600"}
    assert all(int(mode(file), 8) & 0o044 for file in shown)


def test_a_run_that_was_killed_before_its_ledger_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(config(SERVER), path)
    for left in path.iterdir():
        if left.name not in ("versions.json", "config.toml", "private"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    with pytest.raises(Exception, match="exists and is not empty"):
        rundir.create(path)
    for left in (path / "private").iterdir():
        if left.name != "partition.json":
            left.unlink()
    assert len(run(config(SERVER), path).history) == 2
