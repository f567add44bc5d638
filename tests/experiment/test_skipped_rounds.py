"""Rounds that `privacy.min_survivors` skips: what they cost, and that a run with some of them verifies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from federation_runs import charged
from fedveil.executors.inline import Inline
from fedveil.experiment.assembly import federation, prepare
from fedveil.experiment.config import Config
from fedveil.experiment.published_copy import publish
from fedveil.experiment.resolve import data_spec, opened, resolve_here
from fedveil.experiment.result import Result
from fedveil.experiment.run import train
from fedveil.experiment.verification import verification
from fedveil.federation.fit import one_round
from fedveil.federation.progress import start
from fedveil.federation.round import ClientTask, Outcome
from fedveil.ledger.ledger import Ledger
from fedveil.verify.check_run import verify_run
from forged_ledger import ForgedLedger
from method_kit import digits

STEPS = ({"name": "fedglp-adp", "beta0": 0.3}, {"local": "dp-sgd", "example_clip": 1.0, "local_steps": 2}, {"unit": "record"})
CLIENTS: tuple[dict[str, Any], ...] = ({"name": "dp-fedavg"}, {}, {})


class Lossy(Inline):
    """Rounds 1 and 2 lose three clients after they have trained."""

    round = -1

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
        self.round += 1
        for outcome in super().map(tasks):
            lost = self.round in (1, 2) and outcome.client < 3
            yield replace(outcome, release=None, error="its worker process died") if lost else outcome


def skipping(sections: tuple[dict[str, Any], ...], **training: Any) -> Config:
    method, more, privacy = sections
    return digits(
        method,
        "run.seeded_noise=true",
        rounds=4,
        data={"partition": {"kind": "iid", "clients": 10}},
        training={"clients_per_round": 10, **more, **training},
        privacy={"epsilon": 4.0, "delta": 1e-4, "min_survivors": 8, "view": "aggregate", **privacy},
    )


def finished(config: Config, folder: Path) -> Result:
    data = prepare(data_spec(config))
    return train(resolve_here(config, data.population), data, folder, clients=lambda run: lambda job: Lossy(job.context))


def test_personal_models_of_a_skipped_round_are_charged(tmp_path: Path) -> None:
    """Their noisy steps stay in them, and the next release is made with them; before, the row of the round was missing."""
    config = skipping(STEPS)
    Ledger.create(tmp_path / "ledger.sqlite", "r", {}).close()
    job = federation(*opened(config), tmp_path / "ledger.sqlite", "r")
    progress, engine = start(job), Lossy(job.context)
    with engine:
        one_round(job, engine, progress)
        model, personal = progress.model, progress.privates[5]["personal"]
        one_round(job, engine, progress)
    assert "skipped" in progress.history[1]
    assert torch.equal(progress.model, model)
    assert not torch.equal(progress.privates[5]["personal"], personal)
    first, second = charged(tmp_path)
    assert second == replace(first, round=1, participants=7)


def test_epsilon_spent_counts_skipped_rounds_where_noise_is_drawn_in_training(tmp_path: Path) -> None:
    made = finished(skipping(STEPS), tmp_path / "run")
    spent = [row["epsilon_spent"] for row in made.history]
    assert ["skipped" in row for row in made.history] == [False, True, True, False]
    assert spent[0] < spent[1] < spent[2] <= spent[3]
    assert math.isclose(spent[-1], made.privacy.proven.epsilon, rel_tol=1e-3)


def test_a_skipped_round_of_a_noisy_sum_costs_nothing(tmp_path: Path) -> None:
    spent = [row["epsilon_spent"] for row in finished(skipping(CLIENTS), tmp_path / "run").history]
    assert spent[0] == spent[1] == spent[2] < spent[3]


@pytest.mark.parametrize(
    "config",
    [
        skipping(STEPS),
        skipping(CLIENTS),
        skipping(CLIENTS, sampling="poisson"),
        skipping((*CLIENTS[:2], {"view": "server"})),
        skipping(({"name": "noisy-fedavg"}, {"batch_clip": 1.0, "local_steps": 2}, {})),
    ],
    ids=["DP-SGD", "sum", "Poisson", "server", "shares"],
)
def test_a_run_with_skipped_rounds_verifies(config: Config, tmp_path: Path) -> None:
    """Also as it is published; before, a sum that was not released counted as a row that was taken out."""
    made = finished(config, tmp_path / "run")
    assert any("skipped" in row for row in made.history)
    for folder in (tmp_path / "run", publish(tmp_path / "run", tmp_path / "shown")):
        assert [finding for finding in verification(folder).findings if finding.kind in ("contradicted", "unknown")] == []


def test_a_row_of_a_full_round_cannot_be_taken_out(tmp_path: Path) -> None:
    """In a run that skipped others: the rounds that have a row, 0 and 3, had all ten clients."""
    finished(skipping(CLIENTS), tmp_path / "run")
    ledger = ForgedLedger.read(tmp_path / "run")
    ledger.rows = [row for row in ledger.rows if row["round"] != 3]
    ledger.write(coherent=True)
    wrong = [finding.subject for finding in verify_run(tmp_path / "run").findings if finding.kind == "contradicted"]
    assert "rounds of the ledger" in wrong
