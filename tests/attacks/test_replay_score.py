"""The score by which runs are chosen, recorded and replayed: silent where it is right, loud where it leaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

import planted_bugs as bugs
from fedveil.attacks import replay as world
from fedveil.attacks import replay_door as doors
from fedveil.attacks.neighbours import CHANGES
from fedveil.attacks.replay import OTHERS, Replayed, replay, replay_federation
from fedveil.federation import evaluation
from fedveil.federation.evidence import evidence
from fedveil.federation.progress import Federation
from fedveil.training.params import FlatModel
from method_kit import digits, model_of

SELECTION = {"selection": {"runs": 3, "shape": 0, "score_noise": 5.0}}
WITH_TESTS = {"client_test_fraction": 0.25}
SOME = tuple(c for c in CHANGES if c.name in ("no examples", "all targets 0", "an example on which training gives NaN"))


def scored(folder: Path, vary: bugs.Vary | None = None) -> Federation:
    """A small run whose score leaves at its end, changed by `vary`."""
    return bugs.planted(folder, vary, view="aggregate", data=WITH_TESTS, privacy=SELECTION)


def replayed(vary: bugs.Vary | None = None) -> Replayed:
    return replay_federation(lambda folder: scored(folder, vary), rounds=1, changes=SOME)


@pytest.mark.parametrize("method", ["dp-fedavg", "dp-fedsam", "time-adaptive"])
def test_a_score_raises_no_alarm_and_is_held_to_its_sensitivity(method: str) -> None:
    privacy = {"epsilon": 8.0, **SELECTION}
    found = replay(digits({"name": method}, clients=24, data=WITH_TESTS, privacy=privacy), rounds=1)
    assert found.findings == {}
    compared = {check.check: check.compared for check in found.checks}
    assert compared[world.SCORE] == len(found.worlds)
    assert compared[doors.ADDED] == 2 * (1 + len(found.worlds))  # the sum of the round, and that of the scores
    assert compared[OTHERS] >= 23 * len(found.worlds)


def of_all(monkeypatch: pytest.MonkeyPatch, score: Callable[..., Any]) -> None:
    """Another function in the place of the release of the score."""
    monkeypatch.setattr(world, "release_score", score)


def raw_mean(job: Federation, progress: Any) -> float:
    """The score without the door."""
    assert job.client_tests is not None
    model = evaluation.load_final_model(job, progress)
    output, target = evidence(job.context.task, model, job.client_tests.x, job.client_tests.y)
    return float((output.argmax(1) == target).double().mean())


def test_a_score_that_leaves_beside_the_door_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    of_all(monkeypatch, raw_mean)
    assert set(replayed().findings) == {world.SCORE}


@pytest.mark.parametrize(
    ("door", "check"),
    [(bugs.NoNoiseOnScores, doors.DRAWN), (bugs.ScoresByThoseWithTests, doors.UPLOADS)],
)
def test_a_door_that_lets_out_more_of_a_score_than_is_charged_is_found(door: type, check: str) -> None:
    assert check in replayed(bugs.door(door)).findings


def test_a_score_that_is_not_clipped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_away", lambda task, model, x, y: torch.tensor([0.5 * len(y)]))
    assert doors.CLIPPED in replayed(bugs.door(bugs.NoClip)).findings
    assert replayed().findings == {}  # the door clips what is too large


class Normalised(torch.nn.Module):
    """Softmax regression on batch-normalised pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.isnan().any()):
            raise ValueError("not a number")
        found: torch.Tensor = self.out(self.norm(x.flatten(1)))
        return found


def normalised(job: Federation) -> Federation:
    """The run with batch normalisation, whose statistics stay with the clients."""
    torch.manual_seed(1)
    model = model_of(Normalised())
    door = dataclasses.replace(job.context.door, layout=model.layout)
    return dataclasses.replace(
        bugs.context(job, model=model, door=door, buffers=model.buffers()),
        setting=dataclasses.replace(job.setting, layout=model.layout),
    )


def test_clients_score_apart_so_that_nobody_moves_the_others_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch the statistics of batch normalisation, and so all scores, would follow each client's examples."""

    def together(job: Federation, progress: Any) -> float | None:
        tests = job.client_tests
        assert tests is not None
        model = evaluation.load_final_model(job, progress)
        with monkeypatch.context() as patched:
            patched.setattr(FlatModel, "eval", partialmethod(FlatModel.eval, own_statistics=True))
            each = iter(job.context.task.client_scores(tests.offsets, *evidence(job.context.task, model, tests.x, tests.y)))
        monkeypatch.setattr(evaluation, "client_score", lambda *_: next(each))
        return evaluation.release_score(job, progress)

    changes = [c for c in CHANGES if c.name == "huge values"]
    found = replay_federation(lambda folder: scored(folder, normalised), rounds=1, changes=changes)
    assert found.findings == {}
    of_all(monkeypatch, together)
    found = replay_federation(lambda folder: scored(folder, normalised), rounds=1, changes=changes)
    assert set(found.findings) == {OTHERS}


def test_a_network_that_fails_on_certain_examples_shows_nowhere() -> None:
    """Training releases a noised zero, the score counts in the middle, and the run goes on."""
    changes = [c for c in CHANGES if c.name == "an example on which training gives NaN"]
    assert replay_federation(lambda folder: scored(folder, normalised), rounds=3, changes=changes).findings == {}
