"""The public half of a record is a function of what the run's view shows, whatever a method says of private data."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from by_hand import federation, with_client
from fedveil.accounting.types import View
from fedveil.executors.inline import Inline
from fedveil.experiment.config_files import load_config
from fedveil.experiment.run import run
from fedveil.experiment.run_directory import as_written
from fedveil.experiment.spending import EpsilonSpent
from fedveil.federation.checkpoint import _record
from fedveil.federation.evaluation import public_scores
from fedveil.federation.fit import one_round
from fedveil.federation.history import Columns, Record
from fedveil.federation.progress import start
from fedveil.federation.server import VisibleRound, public_figures, release_figures
from fedveil.methods.base import Method
from fedveil.methods.fedavg import DPFedAvg, FedAvg
from fedveil.methods.run_cost import Planner
from fedveil.tasks.task import Column
from fedveil.training.local import Local, Plain, Remembering, State
from seeded_digests import ORACLES

PARTS: list[tuple[Any, Any]] = [([[1.0, 2.0]], [0]), ([[3.0, 1.0]], [1]), ([[0.5, 0.5]], [1])]
OLD = ORACLES / "runs-0.2"


class Telling(Plain, Remembering):
    """Says private figures wherever an objective can say something, and declares them public."""

    columns = (Column("update", public=True), Column("layers", kind="layer", public=True))

    def finish(self, local: Local) -> torch.Tensor:
        update = super().finish(local)
        power = local.model.layout.norms(update)
        local.noised(power)
        local.state.update(update=float(update.norm()), layers=power.tolist())
        return update

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        names = ("update", "participants", "noise_norm", "clip", "test_loss", "epsilon_spent", "anything")
        return {**dict.fromkeys(names, state["update"]), "layers": state["layers"], "layer_clip": state["layers"]}


class Remembers(Plain, Remembering):
    """The same training, which says nothing."""


def recorded(method: Method, client: Plain, view: View, **more: Any) -> list[Record]:
    job = with_client(federation(method, PARTS, view=view, training={"rounds": 2}, **more), client)
    progress = start(job)
    for _ in range(2):
        one_round(job, Inline(job.context), progress)
    return progress.history


@pytest.mark.parametrize("view", View)
@pytest.mark.parametrize(("method", "z"), [(DPFedAvg(clip=1.0), 1.0), (FedAvg(), None)])
def test_nothing_that_an_objective_says_is_in_the_public_half(method: Method, z: float | None, view: View) -> None:
    quiet, told = (recorded(method, client, view, z=z) for client in (Remembers(), Telling()))
    assert [record.public for record in told] == [record.public for record in quiet]
    assert all({"update", "layers", "objective_clip", "objective_test_loss"} <= record.private.keys() for record in told)
    assert not any({"update", "layers"} & record.private.keys() for record in quiet)


def test_noise_that_only_clients_know_of_is_told_in_the_private_half() -> None:
    (first, second) = recorded(FedAvg(), Telling(), View.SERVER)
    assert first.public["noise_norm"] == second.public["cumulative_noise_norm"] == 0.0
    assert first["noise_norm"] == first.private["noise_norm"] > 0
    assert second["cumulative_noise_norm"] == pytest.approx(first["noise_norm"] + second["noise_norm"])


GIVEN = {
    "Method",
    "Setting",
    "Columns",
    "VisibleRound",
    "Row",
    "Task",
    "FlatModel",
    "Tensor",
    "int",
    "float | None",
    "int | None",
}
GIVEN |= {"str | None", "Sequence[Upload]", "Sequence[Tensor] | None", "Sequence[int]", "list[State]", "Sequence[State]"}


def test_the_functions_that_fill_the_public_half_are_given_public_things_alone() -> None:
    """Neither a federation, which has the clients' examples, nor outcomes, private states or the progress, which has both."""
    functions = (public_figures, release_figures, VisibleRound.in_view, public_scores, EpsilonSpent.after, Planner.measured)
    kinds = [p.annotation for f in functions for name, p in inspect.signature(f).parameters.items() if name != "self"]
    assert {*kinds, *(field.type for field in fields(VisibleRound))} <= GIVEN


@pytest.mark.parametrize("view", View)
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_who_is_not_to_see_it_is_not_handed_how_many_took_part(view: View, sampling: str) -> None:
    job = federation(DPFedAvg(clip=1.0), PARTS, view=view, z=1.0, training={"sampling": sampling})
    seen = VisibleRound(0, 2, "nobody answered", 1, sent=[6], norm=1.0, noise=[torch.ones(2)], noise_before=0.0)
    shown = seen.in_view(job.method, job.setting)
    secret = sampling == "poisson" and view is not View.SERVER
    assert (shown.senders, shown.skipped) == ((None, None) if secret else (2, "nobody answered"))
    assert shown.norm == (None if view is View.FINAL else 1.0)
    row = public_figures(job.method, job.setting, Columns(), shown, {})
    assert ("uplink_bytes" in row) is not secret
    assert ("update_norm" in row) is (view is not View.FINAL)


def test_a_record_is_read_as_one_row_and_private_values_come_first() -> None:
    record = Record({"round": 0, "noise_norm": 0.0}, {"noise_norm": 2.0, "failed": 1})
    assert record == {"round": 0, "noise_norm": 2.0, "failed": 1}
    assert list(record) == ["round", "noise_norm", "failed"]
    assert len(record) == 3


def test_a_run_of_0_2_goes_on_and_its_rounds_keep_their_halves(tmp_path: Path) -> None:
    old, new = OLD / "interrupted-server", tmp_path / "run"
    shutil.copytree(old, new)
    history = run(load_config(new / "config.toml"), new, resume=True).history
    assert [row["round"] for row in history] == [0, 1, 2]
    for table in ("history.csv", "private/history.csv", "layers.csv"):
        assert (new / table).read_bytes().startswith((old / table).read_bytes())
    assert not (new / "private" / "layers.csv").exists()


def test_what_the_directory_of_an_old_run_does_not_show_is_private(tmp_path: Path) -> None:
    old = _record({"round": 3, "participants": 2, "clip": 1.0, "layer_clip": [1.0, 2.0], "test_loss": 0.5, "beta": 0.1})
    assert as_written(tmp_path, old, Columns()).public == {"round": 3}
    (tmp_path / "history.csv").write_text("round,clip\n0,1.0\n")
    (tmp_path / "layers.csv").write_text("round,layer,clip\n0,a,1.0\n")
    halves = as_written(tmp_path, old, Columns())
    assert halves.public == {"round": 3, "clip": 1.0, "layer_clip": [1.0, 2.0]}
    assert halves.private == {"participants": 2, "test_loss": 0.5, "beta": 0.1}
