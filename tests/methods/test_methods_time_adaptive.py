"""Time-adaptive spending (Kiani et al. 2025): plans by hand, each client's ledger up to its own cap, in each form and view."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import method_kit as h
from fedveil.accounting.accountant import bound
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Adjacency, Event, Gaussian, SampledGaussian, Unit, View
from fedveil.attacks.replay import replay
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config
from fedveil.experiment.config_files import load_config
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.experiment.run import run
from fedveil.ledger.ledger import Ledger
from fedveil.mechanism.plan import Plan, Released, step_of
from fedveil.methods.fedavg import DPFedAvg
from fedveil.methods.setting import BudgetGroup, Setting
from fedveil.methods.time_adaptive import TimeAdaptive
from method_kit import planner

ROUNDS, CLIENTS = 8, 6
CAPS = {"epsilons": [1.0, 4.0], "save_until": [0.5, 0.25]}
BY_RECORD = ("training.local=dp-sgd", "training.batch_size=16", "privacy.unit=record", "privacy.delta=5e-4")


def config(*overrides: str, **method: Any) -> Config:
    settings = ("privacy.view=server", "privacy.epsilon=4", *overrides)
    return h.at_epsilon_8({"name": "time-adaptive", "clip": 0.5, **method}, *settings, clients=CLIENTS, rounds=ROUNDS)


def plan_of(method: TimeAdaptive, s: Setting, client: int, round: int) -> Plan:
    policy = planner(method, s)
    plan = policy.plan(Released(round, h.torch.zeros(7), None, client=client), policy.start())
    assert isinstance(plan, Plan)
    return plan


def two_groups(**more: Any) -> Setting:
    """One strict client with z = 6 beside nine with z = 2."""
    groups = BudgetGroup(1.0, frozenset([0]), 6.0), BudgetGroup(4.0, frozenset(range(1, 10)), 2.0)
    return replace(h.setting(epsilon=4.0, rounds=ROUNDS, **more), groups=groups)


def test_groups_are_told_by_client_numbers() -> None:
    s = h.setting(epsilon=4.0)
    assert TimeAdaptive().client_epsilons(s) == ()
    assert Counter(TimeAdaptive(epsilons=(1.0, 4.0)).client_epsilons(s)) == {1.0: 5, 4.0: 5}
    shared = TimeAdaptive(epsilons=(4.0, 1.0, 2.0), shares=(0.55, 0.25, 0.2)).client_epsilons(s)
    assert list(shared) == [4.0] * 6 + [1.0] * 2 + [2.0] * 2  # ends at 5.5, 8 and 10, rounded


@pytest.mark.parametrize(
    ("round", "strict", "loose"), [(0, 24.0, 8.0), (1, 24.0, 8.0), (2, 24.0, 2.0), (4, 6.0, 2.0), (7, 6.0, 2.0)]
)
def test_plans_by_hand(round: int, strict: float, loose: float) -> None:
    """A quarter of mu while saving: z is four times as large. c_n = C h / z_n, and the same noise C h for all."""
    method = TimeAdaptive(clip=3.0, saving=0.25, epsilons=(1.0, 4.0), save_until=(0.5, 0.25), shares=(0.1, 0.9))
    harmonic = 10 / (1 / strict + 9 / loose)
    for client, z in ((0, strict), (1, loose), (9, loose)):
        plan = plan_of(method, two_groups(), client, round)
        assert plan.clip == pytest.approx(3 * harmonic / z)
        assert plan.noise_std == pytest.approx(3 * harmonic)
    assert harmonic / strict < 1 < harmonic / loose


def test_without_saving_and_caps_it_is_dp_fedavg() -> None:
    for view in (View.SERVER, View.AGGREGATE):
        s = h.setting(view)
        for method in (TimeAdaptive(clip=0.3, saving=1.0), TimeAdaptive(clip=0.3, save_until=(0.0,))):
            plain = planner(DPFedAvg(clip=0.3), s).plan(h.released([0.0] * 7), {})
            assert all(h.all_same([(plan_of(method, s, 0, t), plain)]) for t in (0, 19))  # type: ignore[list-item]
            assert method.releases(s, view) == DPFedAvg().releases(s, view)


def test_records_are_sampled_less_often_while_saving() -> None:
    s = h.setting(training={"local": "dp-sgd"}, unit=Unit.RECORD, noise_multiplier=1.5)
    first, last = (step_of(plan_of(TimeAdaptive(saving=0.2), s, 0, t)) for t in (4, 5))
    assert first is not None
    assert last is not None
    assert (first.rate, first.expected) == pytest.approx((0.05, 5.0))
    assert (last.rate, last.expected) == (0.25, 25.0)
    assert (first.clip, first.noise_multiplier, first.steps) == (last.clip, last.noise_multiplier, last.steps) == (1.0, 1.5, 4)
    dear, cheap = TimeAdaptive(saving=0.2).releases(s, View.SERVER)
    assert [(type(e), e.count) for e in (dear, cheap)] == [(SampledGaussian, 15 * 4), (SampledGaussian, 5 * 4)]  # type: ignore[union-attr]


def test_price_by_hand() -> None:
    """20 rounds at z = 2, of which five spend half; of a client in at most 16 rounds, the 15 dear ones and one other."""
    s = h.setting()
    assert TimeAdaptive().releases(s, View.SERVER) == [Gaussian(0.5, 15), Gaussian(0.25, 5)]
    few = h.setting(max_participations=16)
    assert TimeAdaptive().releases(few, View.SERVER) == [Gaussian(0.5, 15), Gaussian(0.25, 1)]
    assert TimeAdaptive().releases(h.setting(max_participations=3), View.SERVER) == [Gaussian(0.5, 3)]


def test_a_limit_on_rounds_never_earns_amplification() -> None:
    """The rule shows who is left, so that Poisson sampling is not secret: the events stay unsampled."""
    s = replace(h.setting(View.AGGREGATE, sampling="poisson"), max_participations=16)
    events = TimeAdaptive().releases(s, View.AGGREGATE)
    assert [type(e) for e in events] == [Gaussian, Gaussian]
    free = TimeAdaptive().releases(h.setting(View.AGGREGATE, sampling="poisson"), View.AGGREGATE)
    assert [type(e) for e in free] == [SampledGaussian, SampledGaussian]


def events_of(path: Path) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    with Ledger.open(path) as ledger:
        for _, _, entry in ledger.entries():
            found.setdefault(entry.client, []).append(entry.event)
    return found


def test_each_client_is_charged_up_to_its_own_cap(tmp_path: Path) -> None:
    result = run(config(**CAPS), tmp_path / "run")
    assert (result.ended, [row["spent_clients"] for row in result.history]) == ("", [0] * ROUNDS)
    charged = events_of(tmp_path / "run" / "ledger.sqlite")
    for client, cap, saved in [(c, 1.0, 4) for c in range(3)] + [(c, 4.0, 2) for c in range(3, 6)]:
        mus = [e.mu for e in charged[client] if isinstance(e, Gaussian)]
        assert len(mus) == ROUNDS
        assert mus == pytest.approx([mus[-1] / 2] * saved + [mus[-1]] * (ROUNDS - saved), rel=1e-6)
        assert 0.999 * cap < epsilon_of(math.hypot(*mus), 1e-3) <= cap


def test_the_statement_has_each_cap_and_quotes_the_worst() -> None:
    statement = certify_config(config(**CAPS))
    assert [(round(g.epsilon, 3), g.clients) for g in statement.groups] == [(1.0, 3), (4.0, 3)]
    assert statement.proven.epsilon == statement.groups[-1].epsilon <= 4.0


@pytest.mark.few(1)
@pytest.mark.heavy
@pytest.mark.parametrize("caps", [{}, CAPS])
def test_under_dp_sgd_each_client_is_charged_up_to_its_own_cap(caps: dict[str, Any], tmp_path: Path) -> None:
    result = run(config(*BY_RECORD, **caps), tmp_path / "run")
    assert result.ended == ""
    assert [row["participants"] for row in result.history] == [CLIENTS] * ROUNDS
    charged = events_of(tmp_path / "run" / "ledger.sqlite")
    for client in range(CLIENTS):
        cap = 1.0 if caps and client < 3 else 4.0
        assert len(charged[client]) == ROUNDS
        epsilon, _ = bound(charged[client], 5e-4, accountant="rdp", adjacency=Adjacency.ZERO_OUT)
        assert 0.99 * cap < epsilon <= cap


@pytest.mark.heavy
def test_the_aggregate_view_saves_in_time_alone(tmp_path: Path) -> None:
    poisson = ("privacy.view=aggregate", "training.sampling=poisson", "training.clients_per_round=3")
    result = run(config(*poisson), tmp_path / "run")
    assert (result.ended, len(result.history)) == ("", ROUNDS)
    [(client, events)] = events_of(tmp_path / "run" / "ledger.sqlite").items()
    multipliers = [e.noise_multiplier for e in events if isinstance(e, SampledGaussian)]
    assert client == -1
    assert multipliers == pytest.approx([2 * multipliers[-1]] * 2 + [multipliers[-1]] * 6)
    with pytest.raises(ConfigError, match=r"privacy.view = 'server'"):
        calibrated_setting(config("privacy.view=aggregate", **CAPS))


@pytest.mark.few(1)
@pytest.mark.heavy
@pytest.mark.parametrize("more", [(), pytest.param(BY_RECORD, marks=pytest.mark.slow)])
def test_replay_finds_nothing_where_caps_differ(more: tuple[str, ...]) -> None:
    assert replay(config(*more, **CAPS), rounds=3).findings == {}


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"epsilons": [1.0, 1.0]}, "another epsilon"),
        ({"epsilons": [-1.0, 1.0]}, "another epsilon"),
        ({"epsilons": [1.0, 4.0], "shares": [1.0]}, "give 2 numbers"),
        ({"epsilons": [1.0, 4.0], "shares": [0.5, 0.6]}, "of sum 1"),
        ({"save_until": [0.5, 0.5]}, "one for each of method.epsilons"),
        ({"save_until": [1.5]}, "from 0 to 1"),
        ({"saving": 0.0}, "method.saving"),
    ],
)
def test_refused(method: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        h.digits({"name": "time-adaptive", **method})
    assert words in str(caught.value)


def test_the_largest_cap_is_privacy_epsilon() -> None:
    with pytest.raises(ConfigError, match=r"equal to privacy.epsilon = 4"):
        calibrated_setting(config(epsilons=[1.0, 3.0]))


@pytest.mark.parametrize("path", h.presets("time-adaptive"), ids=lambda p: p.stem)
def test_presets(path: Path) -> None:
    statement = certify_config(load_config(path))
    assert statement.method == "time-adaptive"
    assert statement.proven.epsilon <= (statement.target_epsilon or 0.0)
    assert len(statement.groups) > 1
