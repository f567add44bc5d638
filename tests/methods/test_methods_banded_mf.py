"""Banded matrix factorisation: its sensitivity through the real door, its price, its participation rule, and its gain."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor

import fedveil.federation.fit as fitting
import method_kit as h
from by_hand import Book, federation
from federation_runs import config as small_config
from fedveil.accounting.accountant import bound
from fedveil.accounting.types import Adjacency, Gaussian, Scope, Unit, View
from fedveil.attacks.snapshot import uncharged
from fedveil.errors import ConfigError
from fedveil.executors.inline import Inline
from fedveil.experiment.config import Config
from fedveil.experiment.resolve import opened
from fedveil.federation.fit import fit
from fedveil.federation.progress import start
from fedveil.federation.round import ClientTask, Outcome
from fedveil.ledger.ledger import Ledger
from fedveil.mechanism.mechanisms import Banded, NoiseMemory, Participation
from fedveil.mechanism.plan import Plan
from fedveil.methods.banded_mf import BandedMF
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.studies.twin import twin_sensitivity
from method_kit import planner
from reference_costs import prefix_sum_error, tree_sensitivity_squared
from resumed_runs import go, interrupted

Vector = NDArray[np.float64]
Z = 1.5
LAYERS = {"a": (3,)}
LAYOUT = h.layout(LAYERS)


def plan_of(method: BandedMF, rounds: int, z: float = Z, clients: int = 1000) -> Plan:
    s = h.setting(View.AGGREGATE, LAYERS, clients=clients, cohort=10, rounds=rounds, noise_multiplier=z)
    plan = planner(method, s).plan(h.released([0.0] * 3), {})
    assert isinstance(plan, Plan)
    return plan


# --- sensitivity ---------------------------------------------------------------------------------------------------------


def patterns(rounds: int, separation: int) -> Iterator[tuple[int, ...]]:
    """All sets of rounds that the rule allows a client, but the empty one."""
    for size in range(1, rounds + 1):
        for chosen in itertools.combinations(range(rounds), size):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                yield chosen


def left(plan: Plan, rounds: int, updates: dict[int, Tensor]) -> Vector:
    """Everything that leaves in a run [T, 3], in the model's units: another client gives 0.3, ours gives `updates`.

    The noise is seeded, so that it is the same in every run of this door and falls out of differences.
    """
    scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
    door = Door(LAYOUT, scope, "r", Book(), Randomness(7, True), memory=NoiseMemory())
    ((_, k),) = door.parts.grid(plan)
    found = []
    for t in range(rounds):
        parts = [door.seal(updates.get(t, torch.zeros(3)), plan, 0, t), door.seal(torch.full((3,), 0.3), plan, 1, t)]
        integers = door.release_sum(parts, plan, t, 2.0).integers
        assert integers is not None
        found.append(integers.numpy() * 2.0**k)
    return np.array(found)


@pytest.mark.few(2)
@pytest.mark.parametrize("rounds", [*range(1, 5), *(pytest.param(t, marks=pytest.mark.slow) for t in range(5, 9))])
def test_the_sensitivity_is_what_the_door_lets_one_client_move(rounds: int) -> None:
    """Every pattern that the rule allows, updates of the clip's norm in one or another direction: never more, and reached.

    With the band of the separation and with the whole matrix, whose columns overlap.
    """
    generator = torch.Generator().manual_seed(rounds)
    for separation, band in [(b, band) for b in range(1, rounds + 1) for band in dict.fromkeys((b, rounds))]:
        method = BandedMF(clip=0.8, separation=separation, band=band)
        plan = plan_of(method, rounds)
        assert isinstance(plan.mechanism, Banded)
        nothing, largest = left(plan, rounds, {}), 0.0
        for chosen in patterns(rounds, separation):
            one = torch.tensor([0.8, 0.0, 0.0])
            other = torch.nn.functional.normalize(torch.randn(3, generator=generator), dim=0) * 5.0  # the door clips it
            for update in (one, other):
                moved = np.linalg.norm(left(plan, rounds, dict.fromkeys(chosen, update)) - nothing)
                assert moved <= 0.8 * plan.mechanism.sensitivity
                largest = max(largest, float(moved))
        assert largest == pytest.approx(0.8 * plan.mechanism.sensitivity, rel=1e-5)


def test_one_round_too_close_would_move_more() -> None:
    """What the rule is for: with a client in rounds 0 and 2 at separation 3, the charged sensitivity would be too small."""
    plan = plan_of(BandedMF(clip=1.0, separation=3), 4)
    assert isinstance(plan.mechanism, Banded)
    too_close = left(plan, 4, dict.fromkeys((0, 2), torch.tensor([1.0, 0.0, 0.0]))) - left(plan, 4, {})
    assert np.linalg.norm(too_close) > 1.05 * plan.mechanism.sensitivity


def test_the_coefficients_and_the_sensitivity_by_hand() -> None:
    """c = 1, 1/2, 3/8 exactly; T = 5, b = 3: rounds 0 and 3, whose second column is cut after two rounds."""
    plan = plan_of(BandedMF(separation=3), 5)
    assert isinstance(plan.mechanism, Banded)
    assert plan.mechanism.coefficients == (1.0, 0.5, 0.375)
    assert plan.mechanism.sensitivity == pytest.approx(math.sqrt((1 + 1 / 4 + 9 / 64) + (1 + 1 / 4)))
    assert (plan.mechanism.participation.times, plan.mechanism.participation.separation) == (2, 3)
    narrow = plan_of(BandedMF(separation=3, band=1), 5).mechanism
    assert isinstance(narrow, Banded)
    assert narrow.sensitivity == pytest.approx(math.sqrt(2))


# --- price ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("adjacency", "factor"), [("zero_out", 1), ("replace_one", 2)])
def test_the_run_costs_one_gaussian_of_its_sensitivity(adjacency: str, factor: int) -> None:
    """T = 60, b = 10, z = 8: mu = 3.278 / 8 (docs/privacy.md); replace-one doubles it; epsilon three times."""
    kind = Adjacency(adjacency)
    s = h.setting(View.AGGREGATE, clients=1000, cohort=10, rounds=60, noise_multiplier=8.0, adjacency=kind)
    method = BandedMF(separation=10)
    (event,) = method.releases(s, View.AGGREGATE)
    assert isinstance(event, Gaussian)
    plan = planner(method, s).plan(h.released([0.0] * 7), {})
    assert isinstance(plan, Plan)
    assert isinstance(plan.mechanism, Banded)
    mu = factor * plan.mechanism.sensitivity / 8
    assert plan.mechanism.sensitivity == pytest.approx(3.27842, abs=2e-4)  # rounded to 2^-10
    assert event.mu * math.sqrt(event.count) == pytest.approx(mu, rel=1e-12)
    epsilon = bound([event], 1e-5)[0]
    by_hand = norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2)
    assert by_hand == pytest.approx(1e-5, rel=1e-6)
    accountant = pld_privacy_accountant.PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(dp_event.GaussianDpEvent(1 / mu))
    assert accountant.get_epsilon(1e-5) == pytest.approx(epsilon, rel=1e-3)


def spaced(*overrides: str, **more: Any) -> Config:
    """Twelve rounds of 5 of 40 digits clients, each in every fourth round at most."""
    method = {"name": "banded-mf", "separation": 4}
    sections = {"training": {"clients_per_round": 5, "batch_size": 32}, "privacy": {"epsilon": 8.0}}
    return h.digits(method, *overrides, clients=40, rounds=12, **{**sections, **more})


@pytest.mark.parametrize("more", [(), ("method.band=12",)])
def test_its_ledger_holds_the_whole_price_in_its_first_row(more: tuple[str, ...], tmp_path: Path) -> None:
    job = h.job_of(spaced(*more), tmp_path / "l")
    h.trained(job)
    with Ledger.open(tmp_path / "l") as ledger:
        events = [entry.event for _, _, entry in ledger.entries()]
    assert [e for e in events[1:] if e != Gaussian(0.0)] == []
    assert len(events) == 12
    assert isinstance(events[0], Gaussian)
    assert 0.999 * 8.0 < bound([events[0]], 1e-3)[0] <= 8.0


# --- the participation rule ----------------------------------------------------------------------------------------------


def check_rule(cohorts: dict[int, list[int]], times: int, separation: int) -> None:
    """No client more often than `times` or closer than `separation`; and not for want of being asked."""
    rounds_of: dict[int, list[int]] = defaultdict(list)
    for t in sorted(cohorts):
        for client in cohorts[t]:
            rounds_of[client].append(t)
    assert max(len(rounds) for rounds in rounds_of.values()) == times
    assert min(b - a for rounds in rounds_of.values() for a, b in itertools.pairwise(rounds)) == separation


def sampled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """(round, clients) of each sample that is drawn from now on."""
    drawn: list[tuple[int, list[int]]] = []
    real = fitting.sample

    def noted(job: Any, progress: Any) -> list[int]:
        drawn.append((progress.round, real(job, progress)))
        return drawn[-1][1]

    monkeypatch.setattr(fitting, "sample", noted)
    return drawn


@pytest.mark.few(1)
@pytest.mark.parametrize(("clients", "separation"), [(20, 4), (23, 4), (60, 10)])
def test_the_sampler_enforces_the_rule(clients: int, separation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = sampled(monkeypatch)
    training = {"rounds": 4 * separation, "clients_per_round": 5}
    job = federation(BandedMF(separation=separation), [([[0.0, 0.0]], [0])] * clients, z=1.0, training=training)
    fit(job, Inline(job.context), start(job))
    assert all(len(set(cohort)) == 5 for _, cohort in drawn)
    check_rule(dict(drawn), 4, separation)


class Losing:
    """An engine whose process of client 0 vanishes each time."""

    def __init__(self, real: Inline) -> None:
        self.real = real

    def __enter__(self) -> Losing:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
        for task in tasks:
            gone = Outcome(task.client, None, task.policy_state, task.private, error="its worker process died")
            yield gone if task.client == 0 else next(iter(self.real.map([task])))


@pytest.mark.parametrize("enforced", [None, Participation(3, 10), Participation(4, 9)])
def test_a_rule_that_nobody_enforces_has_no_price(enforced: Participation | None) -> None:
    """With a client in every round, a price for few participations had a finite and wrong number."""
    job = h.job_of(spaced())
    assert job.participation not in (None, enforced)
    with pytest.raises(ConfigError, match=r"is priced for Participation.*, and the sampler enforces"):
        h.trained(replace(job, participation=enforced))
    assert h.book(job).entries == []


def test_a_client_that_vanished_counts_as_having_taken_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it came is not the sampler's to use: it is chosen no sooner again."""
    drawn = sampled(monkeypatch)
    job = federation(BandedMF(separation=4), [([[0.0, 0.0]], [0])] * 20, z=1.0, training={"rounds": 16, "clients_per_round": 5})
    fit(job, Losing(Inline(job.context)), start(job))
    assert sum(0 in cohort for _, cohort in drawn) == 4
    check_rule(dict(drawn), 4, 4)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("at", "seeded"),
    [
        *[(1, False), (2, True), (5, False)],
        *(pytest.param(*o, marks=pytest.mark.slow) for o in [(1, True), (2, False), (5, True)]),
    ],
)
def test_the_rule_holds_over_resumes_and_a_round_that_is_done_again_has_the_same_clients(
    at: int, seeded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = small_config(
        {"name": "banded-mf", "separation": 3},
        training={"rounds": 9, "clients_per_round": 4},
        data={"partition": {"kind": "iid", "clients": 12}},
        run={"seeded_noise": seeded},
    )
    drawn = sampled(monkeypatch)
    interrupted(configuration, tmp_path / "a", at)
    assert go(configuration, tmp_path / "a", resume=True).ended == ""
    first, again = (cohort for t, cohort in drawn if t == at - 1)
    assert first == again
    assert [t for t, _ in drawn] == [*range(at), at - 1, *range(at, 9)]
    check_rule(dict(drawn), 3, 3)


# --- what it is good for -------------------------------------------------------------------------------------------------


def walk(method: BandedMF, rounds: int, seed: int) -> tuple[float, float]:
    """Noise multiplier at epsilon 4, and the root-mean-square of what noise alone moves the model by over the rounds.

    In the model's units; clients have no examples, so that all that moves the model is noise.
    """
    empty: Any = ([], [])
    training = {"rounds": rounds, "clients_per_round": 6}
    known = federation(method, [empty] * 60, training=training, z=1.0).setting
    z = method.calibrate(replace(known, noise_multiplier=None, epsilon=4.0)).z
    wide = torch.nn.Linear(2, 2000)
    job = federation(method, [empty] * 60, training=training, z=z, seed=seed, module=wide)
    progress, power, begin = start(job), [], job.context.model.vector.clone()
    fit(job, Inline(job.context), progress, lambda p: power.append(float((p.model - begin).square().mean())))
    return z, math.sqrt(np.mean(power))


@pytest.mark.slow
@pytest.mark.heavy
def test_prefix_sums_carry_less_noise_than_independent_noise_at_the_same_epsilon() -> None:
    """T = 40, b = 10, each client at most 4 times under both; both errors are the predicted ones."""
    rounds, times = 40, 4
    z, error = walk(BandedMF(clip=1.0, separation=10), rounds, 5)
    training = {"rounds": rounds, "clients_per_round": 6}
    s = federation(BandedMF(separation=10), [([[0.0, 0.0]], [0])] * 60, training=training, z=z).setting
    plan = planner(BandedMF(separation=10), s).plan(h.released([0.0] * 6), {})
    assert isinstance(plan, Plan)
    assert isinstance(plan.mechanism, Banded)
    assert error == pytest.approx(z / 6 * prefix_sum_error(plan.mechanism.coefficients, rounds) / math.sqrt(rounds), rel=0.02)
    z_plain, plain = walk(BandedMF(clip=1.0, separation=10, band=1), rounds, 5)  # C = I: independent noise under the same rule
    assert plain == pytest.approx(z_plain / 6 * math.sqrt((rounds + 1) / 2), rel=0.02)
    assert z == pytest.approx(z_plain * plan.mechanism.sensitivity / math.sqrt(times), rel=1e-4)  # the same mu
    assert error < 0.75 * plain


def error(rounds: int, separation: int, band: int) -> float:
    """Of an iterate, root-mean-square over the rounds, in clips at mu = 1."""
    mechanism = plan_of(BandedMF(separation=separation, band=band), rounds).mechanism
    assert isinstance(mechanism, Banded)
    return mechanism.sensitivity * prefix_sum_error(mechanism.coefficients, rounds) / math.sqrt(rounds)


def tree_error(rounds: int, separation: int) -> float:
    """The same where each prefix is a sum of noisy dyadic blocks (Kairouz et al. 2021, without Honaker's estimate)."""
    blocks = sum(t.bit_count() for t in range(1, rounds + 1)) / rounds
    return math.sqrt(tree_sensitivity_squared(rounds, separation, -(-rounds // separation)) * blocks)


@pytest.mark.parametrize(
    ("rounds", "separation", "expected"),
    [(30, 10, (6.82, 3.54, 4.16, 6.32)), (128, 16, (22.72, 8.33, 10.93, 23.09)), (128, 128, (8.03, 2.45, 2.45, 5.30))],
)
def test_the_band_of_the_separation_has_the_least_error(rounds: int, separation: int, expected: tuple[float, ...]) -> None:
    """The table of docs/methods/banded-mf.md: independent noise, band b, the whole matrix, a tree."""
    found = [error(rounds, separation, band) for band in (1, separation, rounds)] + [tree_error(rounds, separation)]
    assert found == pytest.approx(expected, rel=2e-3)
    assert min(found) == found[1]


@pytest.mark.heavy
def test_it_learns_better_than_independent_noise_at_the_same_epsilon() -> None:
    """Digits, 180 clients, each in at most 3 of 30 rounds under both: mean accuracy of three seeds."""
    accuracy = []
    shared = ("training.clients_per_round=18", "training.batch_size=8", "training.local_epochs=2", "privacy.epsilon=6")
    for band in (10, 1):  # of width 1 the noise is independent
        method, runs = {"name": "banded-mf", "separation": 10, "band": band, "clip": 0.5}, []
        for seed in (1, 2, 3):
            configuration = h.at_epsilon_8(method, *shared, f"run.seed={seed}", clients=180, rounds=30)
            runs.append(h.trained(replace(h.job_of(configuration), evaluate_every=30), stacked=True).history[-1]["test_accuracy"])
        accuracy.append(float(np.mean(runs)))
    assert accuracy[0] > 0.6
    assert accuracy[0] > accuracy[1]


@pytest.mark.parametrize("kind", ["snapshot", "twin"])
def test_what_is_trained_beside_a_run_leaves_no_state_behind(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attack or a twin trains rounds of its own: its noise has nothing to do with the state of a run, twice neither."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        if kind == "snapshot":
            job = uncharged(*opened(spaced()), 0)
            fitting.one_round(job, Inline(job.context), start(job))
        else:
            moved = twin_sensitivity(h.at_epsilon_8({"name": "banded-mf", "separation": 1}), 0)
            assert 0 < min(moved) <= max(moved) < 1  # the same noise in both runs, and other data
    assert list(tmp_path.iterdir()) == []


# --- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (("privacy.view=server",), "set privacy.view = 'aggregate' or 'final'"),
        (("training.sampling=poisson",), "set training.sampling = 'fixed'"),
        (("privacy.min_survivors=3",), "leave privacy.min_survivors and privacy.max_participations out"),
        (("training.clients_per_round=11",), "need 44 clients, and there are 40: lower one of them"),
        (("training.local=dp-sgd", "privacy.unit=record"), "banded-mf adds its own noise to whole updates"),
        (("method.separation=0",), r"method\.separation"),
    ],
)
def test_refused(overrides: tuple[str, ...], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        h.job_of(spaced(*overrides))


def test_a_bound_on_participations_beside_the_rule_is_refused() -> None:
    s = h.setting(View.AGGREGATE, clients=1000)
    for bounded in (replace(s, max_participations=3), replace(s, min_survivors=3)):
        with pytest.raises(ConfigError, match="banded-mf has a participation rule of its own"):
            BandedMF().calibrate(bounded)
