"""What layers draw from global generators for one client, or for one test, never follows from how much was drawn for another."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import method_kit as h
from fedveil.executors.inline import Inline
from fedveil.federation import evaluation
from fedveil.federation.clients import Clients
from fedveil.federation.evaluation import evaluate, release_score
from fedveil.federation.progress import Federation, start
from fedveil.federation.round import Work, attempted, planned
from fedveil.release.noise import Randomness
from fedveil.tasks.classification import Classification

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": lambda z: functional.dropout(z),  # in tests as well, since nothing says that it trains: a common slip
    "numpy": lambda z: z * torch.from_numpy(np.random.rand(*z.shape) < 0.5),  # noqa: NPY002
    "python": lambda z: z * torch.tensor([[random.random() < 0.5] for _ in z]),
}


class Dropping(nn.Module):
    """A perceptron that drops hidden units at random whenever it is called."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.first, self.last = source, nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(DRAWS[self.source](torch.relu(self.first(x.flatten(1)))))
        return out


def without_some(clients: Clients, fewer: int) -> Clients:
    """The same clients, of whom the first has so many examples less."""
    offsets = clients.offsets.copy()
    offsets[1:] -= fewer
    return replace(clients, x=clients.x[fewer:], y=clients.y[fewer:], offsets=offsets)


def worlds(source: str, *, fewer: int = 1, **privacy: object) -> list[Federation]:
    """Two runs that differ in how many examples the first client has, to train on and to test on."""
    options = ("privacy.view=aggregate", "run.engine=inline", "data.client_test_fraction=0.3")
    there = h.job_of(h.digits({"name": "dp-fedavg", "clip": 0.1}, *options, privacy={"noise_multiplier": 1.0, **privacy}))
    clients, tests = there.context.clients, there.context.tests
    assert tests is not None
    found = []
    for some in (0, fewer):
        torch.manual_seed(0)
        model, own = h.model_of(Dropping(source)), without_some(tests, some)
        door, held = replace(there.context.door, layout=model.layout), without_some(clients, some)
        context = replace(there.context, model=model, buffers=model.buffers(), door=door, clients=held, tests=own)
        found.append(replace(there, context=context, client_tests=own))
    return found


def seed_all() -> None:
    """As programs do at their start."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


@pytest.mark.parametrize("source", DRAWS)
def test_one_client_moves_no_update_of_another(source: str) -> None:
    """Before, five examples less at one client moved the sum of the others by several clips, with numpy and Python."""
    sums = []
    for job in worlds(source, fewer=5):
        seed_all()
        tasks = [h.first_task(job, client) for client in range(len(job.context.clients))]
        works = [attempted(job.context, task, planned(job.context, task)) for task in tasks]
        assert all(isinstance(work, Work) for work in works)
        sums.append([work.update for work in works[1:] if isinstance(work, Work)])
    assert all(one.equal(two) for one, two in zip(*sums, strict=True))


@pytest.mark.parametrize("source", DRAWS)
def test_a_public_score_says_nothing_of_clients_own_tests(source: str) -> None:
    """Before, one example less in a client's own test changed the next figures on the public test set, without any noise."""
    rows = []
    for job in worlds(source):
        seed_all()
        progress = start(job)
        evaluate(job, progress)
        rows.append({name: value for name, value in evaluate(job, progress).items() if name.startswith("test_")})
    assert rows[0]["test_loss"] > 0
    assert rows[0] == rows[1]


@pytest.mark.parametrize("source", DRAWS)
def test_one_client_moves_no_score_of_another(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, one example less in a client's own test moved what others add to the score by which a run is chosen."""
    found: list[list[Tensor]] = []
    away = evaluation._away

    def kept(*given: Any) -> Tensor:
        found[-1].append(away(*given))
        return found[-1][-1]

    monkeypatch.setattr(evaluation, "_away", kept)
    for job in worlds(source, selection={"runs": 1, "score_noise": 4.0}):
        seed_all()
        found.append([])
        release_score(job, start(job))
    assert all(one.equal(two) for one, two in zip(found[0][1:], found[1][1:], strict=True))


def test_what_a_loss_draws_under_dp_sgd_is_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """One example less moves the numbers of those behind it in its batch."""
    drawn: list[float] = []
    losses = Classification.losses

    def drawing(self: Classification, output: Tensor, target: Tensor) -> Tensor:
        drawn.append(np.random.rand() + random.random())  # noqa: NPY002
        return losses(self, output, target)

    monkeypatch.setattr(Classification, "losses", drawing)
    options = ("privacy.unit=record", "training.local=dp-sgd", "training.example_clip=1", "privacy.delta=1e-4")
    job = h.job_of(h.digits({"name": "dp-fedavg"}, "run.seeded_noise=false", *options, privacy={"noise_multiplier": 1.0}))
    task = h.first_task(job, 0)
    found = []
    for _ in range(2):
        seed_all()
        drawn.clear()
        assert isinstance(attempted(job.context, task, planned(job.context, task)), Work)
        found.append(drawn[0])
    assert found[0] != found[1]


def test_what_a_program_drew_for_itself_goes_on_as_before() -> None:
    job = worlds("torch")[0]
    seed_all()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index] # noqa: NPY002
    with Inline(job.context) as engine:
        list(engine.map([h.first_task(job, 0)]))
    evaluate(job, start(job))
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index] # noqa: NPY002


def test_numpys_global_functions_may_draw_from_a_generator_of_the_users_choice() -> None:
    usual, chosen = np.random.get_bit_generator(), np.random.PCG64(1)
    np.random.set_bit_generator(chosen)
    try:
        with Randomness(0).forward(torch.device("cpu"), 0, 0):
            inside = np.random.rand()  # noqa: NPY002
        assert np.random.get_bit_generator() is chosen
        assert np.random.rand() == np.random.Generator(np.random.PCG64(1)).random()  # noqa: NPY002
    finally:
        np.random.set_bit_generator(usual)
    with Randomness(0).forward(torch.device("cpu"), 0, 0):
        assert np.random.rand() == inside  # noqa: NPY002
