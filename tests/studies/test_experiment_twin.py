"""Twin runs: distances that can be worked out by hand, and noise that cancels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from typer.testing import CliRunner

from fedveil.cli.app import app
from fedveil.data.load import load
from fedveil.errors import ConfigError
from fedveil.executors.device import gpu_problem
from fedveil.executors.stacked_models import Stack
from fedveil.experiment.assembly import prepare
from fedveil.experiment.config import Config, configure
from fedveil.experiment.recorded_run import read_run
from fedveil.experiment.resolve import data_spec, resolve
from fedveil.experiment.run_directory import present
from fedveil.federation.round import client_round
from fedveil.release.sealed import Contribution
from fedveil.report.figures import plot_run
from fedveil.report.report import page_values
from fedveil.studies.twin import neighbour, twin_sensitivity
from method_kit import first_task, job_of


def config(**sections: Any) -> Config:
    """20 clients of some 72 digits, all in each round; two clipped steps of rate 0.1 with V = 1."""
    training = {"rounds": 3, "sampling": "fixed", "local_steps": 2, "batch_size": 10, "batch_clip": 1.0, "optimizer": {"lr": 0.1}}
    return configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 20}},
        model="linear",
        method=sections.get("method", {"name": "noisy-fedavg", "sigma": 0.1}),
        training={**training, **sections.get("training", {})},
        run={"seed": 3, **sections.get("run", {})},
    )


def test_first_round_of_an_absent_client_is_its_share_of_the_mean() -> None:
    """After one round the models differ by that client's update / 20: a client without data still adds its noise."""
    c = config(training={"rounds": 1}, method={"name": "noisy-fedavg", "sigma": 1e-6})
    job = job_of(c)
    task, policy = first_task(job, 7), job.context.policy
    release = client_round(job.context, task).release
    assert isinstance(release, Contribution)
    share = job.context.door.release_sum([release], policy.plan(task.released, policy.start()), 0, 20.0).vector
    assert twin_sensitivity(c, 7, "absent") == [pytest.approx(float(share.norm()), rel=1e-3)]


def test_known_distance_of_steps_that_never_turn() -> None:
    """20 clients of one zero each, without noise. Client 4's label becomes 1: its steps have length rate * V = 1e-4 along the
    unit vectors of (p - e0) x and (p - e1) x, p being hardly changed: the models are T K 1e-4 / 20 |u0 - u1| apart."""
    c = config(method={"name": "fedavg"}, training={"batch_clip": 1e-3})
    data = load("digits", None, True)
    zeros = np.flatnonzero(data.y_train == 0)[:20]
    one_each = replace(prepare(data_spec(c)).partition, clients=[zeros[i : i + 1] for i in range(20)])
    prepared = prepare(data_spec(c), data, one_each)
    weight, bias = (q.detach() for q in resolve(c, prepared.population).template().module.parameters())
    x = prepared.clients.examples(4)[0].flatten()
    p = torch.softmax(weight @ x + bias, 0)
    units = []
    for label in (0, 1):
        error = p - torch.nn.functional.one_hot(torch.tensor(label), 10)
        gradient = torch.cat([torch.outer(error, x).flatten(), error])
        units.append(gradient / gradient.norm())
    step = float((units[0] - units[1]).norm()) * 2 * 1e-4 / 20
    assert twin_sensitivity(c, 4, "labels", data=data, partition=one_each) == pytest.approx([step, 2 * step, 3 * step], rel=0.02)


def test_noise_and_batches_are_the_same_in_both_runs() -> None:
    """Noise a hundred times larger leaves the first round's distance as it is; a twin with the same data has distance 0."""
    quiet, loud = (config(method={"name": "noisy-fedavg", "sigma": s}, training={"rounds": 1}) for s in (0.001, 0.1))
    assert twin_sensitivity(quiet, 2) == pytest.approx(twin_sensitivity(loud, 2), rel=1e-3)


def test_the_engine_is_the_configured_one_if_it_trains_clients_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """`batched` gives the distances of `inline` up to rounding, and all rounds went through it; `cuda` needs a GPU."""
    alone, passes = twin_sensitivity(config(), 2), []
    monkeypatch.setattr(Stack, "_stacked", lambda *given, ours=Stack._stacked: (passes.append(len(given[1])), ours(*given)))
    together = twin_sensitivity(config(run={"engine": "batched", "clients_at_once": 7}), 2)
    assert together == pytest.approx(alone, rel=1e-4)
    assert max(passes) == 7
    assert len(passes) == 2 * 3 * 2 * 3, "two runs of three rounds, two steps of 20 clients by sevens"
    if gpu_problem():
        with pytest.raises(ConfigError, match="cuda"):
            twin_sensitivity(config(run={"engine": "cuda"}), 2)


def test_distances_stay_below_the_sensitivity_of_the_first_round() -> None:
    """2 V K eta / n = 2 * 2 * 0.1 / 20 in the first round; one record among 72 moves less than all labels do."""
    labels, record = twin_sensitivity(config(), 0, "labels"), twin_sensitivity(config(), 0)
    assert 0 < record[0] < labels[0] <= 0.02 * (1 + 1e-6)
    assert len(labels) == 3


def test_a_neighbour_differs_in_one_client_alone() -> None:
    prepared = prepare(data_spec(config()))
    for change in ("labels", "record", "absent"):
        other = neighbour(prepared, 5, change)  # type: ignore[arg-type]
        for c in range(20):
            same = all(torch.equal(a, b) for a, b in zip(prepared.clients.examples(c), other.examples(c), strict=True))
            assert same is (c != 5)
    assert neighbour(prepared, 5, "absent").size(5) == 0
    with pytest.raises(ConfigError, match="0 to 19"):
        neighbour(prepared, 20, "labels")


def test_the_command_leaves_a_directory_that_plots(tmp_path: Path) -> None:
    """The distances are a column of its history; the plot has it; the same client gives the same distances from Python."""
    file, out = tmp_path / "c.toml", tmp_path / "twins"
    file.write_text(tomli_w.dumps(present(config().model_dump(mode="json"))))
    called = CliRunner().invoke(app, ["twin", str(file), "--client", "2", "--out", str(out), "--quiet"])
    assert called.exit_code == 0, called.output
    recorded = [float(row["sensitivity"]) for row in read_run(out).history]
    assert recorded == pytest.approx(twin_sensitivity(config(), 2), rel=1e-9)
    assert plot_run(out, ["sensitivity", "update"], tmp_path / "a.svg").is_file()
    assert page_values([read_run(out)])["groups"][0]["ended"] == ["after its last round"], "its page does not call it unfinished"
    again = CliRunner().invoke(app, ["twin", str(file), "--out", str(out), "--quiet"])
    assert isinstance(again.exception, ConfigError)
