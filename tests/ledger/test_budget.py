"""Budgets: enforcement, replay from the ledger, several clients and processes, and adversarial policies."""

from __future__ import annotations

import json
import math
import os
import traceback
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import mpmath as mp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.accounting.types import Adjacency, Event, Gaussian, SampledGaussian, Scope, Unbounded, Unit, View
from fedveil.errors import BudgetExhausted, ConfigError, LedgerError
from fedveil.ledger.budget import AGGREGATE, Budget, Budgets, Filter, FixedPlan, GdpFilter, RdpFilter
from fedveil.ledger.ledger import Entry, Ledger

SERVER = Scope(Unit.CLIENT, Adjacency.REPLACE_ONE, View.SERVER)
SUM = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
GDP = GdpFilter(1.0, 1e-5)


def entry(event: Event, client: int = 0, scope: Scope = SERVER) -> Entry:
    return Entry(
        *("r1", 0, client, scope.unit, scope.adjacency, scope.view, event),
        clip=(1.0,),
        noise_std=(1.0,),
        coordinates=1,
        dimension=1,
        participants=1,
    )


def test_nothing_is_counted_by_a_refusal() -> None:
    budget = Budget(GDP, SERVER)
    budget.spend(Gaussian(GDP.share(2)))
    spent = budget.spent
    for ask in (Gaussian(GDP.mu), Gaussian(1e100, 2**62), Unbounded("raw")):
        with pytest.raises(BudgetExhausted):
            budget.check(ask)
        with pytest.raises(BudgetExhausted):
            budget.spend(ask)
    with pytest.raises(ConfigError):
        budget.spend(SampledGaussian(0.1, 5.0))
    assert budget.spent == spent
    budget.check(Gaussian(GDP.share(2)))
    assert budget.spent == spent
    assert budget.spent_fraction == pytest.approx(0.5, rel=1e-9)


def test_the_message_says_what_was_asked_what_is_left_and_for_whom() -> None:
    budget = Budget(GDP, SERVER)
    budget.spend(Gaussian(GDP.share(4)))
    with pytest.raises(BudgetExhausted) as caught:
        budget.check(Gaussian(GDP.mu))
    message = str(caught.value)
    for part in (
        "asks 100.0000%",
        "75.0000% is left",
        "epsilon = 1 at delta = 1e-5",
        str(SERVER),
        "Nothing was released",
        "stop",
    ):
        assert part in message
    assert "rounding" not in message
    with pytest.raises(BudgetExhausted, match="rounding error"):
        budget.check(Gaussian(GDP.mu * math.sqrt(0.75) * (1 + 1e-9)))
    with pytest.raises(BudgetExhausted, match=r"unbounded cost \(the policy read the loss\)"):
        budget.check(Unbounded("the policy read the loss"))


def test_a_replayed_ledger_counts_all_of_it_even_above_the_cap() -> None:
    budget = Budget(GDP, SERVER)
    budget.replay([(1, 0.0, entry(Gaussian(GDP.share(2)))), (2, 0.0, entry(Gaussian(GDP.mu)))])
    assert budget.spent_fraction == pytest.approx(1.5, rel=1e-9)
    for event in (Gaussian(1e-9), Gaussian(0.0)):
        with pytest.raises(BudgetExhausted):
            budget.check(event)


@pytest.mark.parametrize("event", [Unbounded("raw"), SampledGaussian(0.1, 5.0)])
def test_a_replayed_release_without_a_bound_blocks_everything(event: Event) -> None:
    budget = Budget(GDP, SUM)
    budget.replay([(1, 0.0, entry(event, AGGREGATE, SUM))])
    assert budget.spent_fraction == math.inf
    with pytest.raises(BudgetExhausted, match="cannot bound"):
        budget.check(Gaussian(0.0))
    again = Budget(GDP, SUM)
    again.restore(budget.state())
    with pytest.raises(BudgetExhausted, match="cannot bound"):
        again.check(Gaussian(0.0))


@pytest.mark.parametrize(
    "scope",
    [
        replace(SERVER, view=View.AGGREGATE),
        replace(SERVER, unit=Unit.RECORD),
        replace(SERVER, adjacency=Adjacency.ZERO_OUT),
    ],
)
def test_rows_of_another_scope_are_refused_not_skipped(scope: Scope) -> None:
    rows = [(1, 0.0, entry(Gaussian(0.1), 0, scope)), (2, 0.0, entry(Gaussian(0.1)))]
    for budgets in (Budget(GDP, SERVER), Budgets(GDP, SERVER)):
        with pytest.raises(LedgerError, match="do not add up"):
            budgets.replay(rows)
    tolerant = Budgets(GDP, SERVER, others=[scope])
    tolerant.replay(rows)
    assert tolerant.of(0).spent == Fraction(0.1) ** 2


def test_state_survives_json_exactly() -> None:
    for rule, event in (
        (GDP, Gaussian(0.01)),
        (RdpFilter(2.0, 1e-5, 16.0), SampledGaussian(0.1, 4.0)),
        (FixedPlan(Gaussian(0.1), 5), Gaussian(0.05)),
    ):
        budgets = Budgets(rule, SUM)
        for client in (3, 5, 3):
            budgets.of(client).spend(event)
        again = Budgets(rule, SUM)
        again.restore(json.loads(json.dumps(budgets.state())))
        assert [again.of(c).spent for c in (3, 5)] == [budgets.of(c).spent for c in (3, 5)]
        assert again.of(3).spent == 2 * again.of(5).spent > 0


def test_a_state_that_does_not_fit_is_refused() -> None:
    state = Budget(GDP, SERVER).state()
    with pytest.raises(ConfigError, match="configuration of the run"):
        Budget(GdpFilter(2.0, 1e-5), SERVER).restore(state)
    with pytest.raises(ConfigError, match="configuration of the run"):
        Budget(GDP, SUM).restore(state)
    for broken in ({"spent": "-1"}, {"spent": "nan"}, {"spent": "1/0"}):
        with pytest.raises(ConfigError, match="damaged"):
            Budget(GDP, SERVER).restore(state | broken)
    for nonsense in ({}, {"seen": 1, "clients": []}, {"seen": "x", "clients": {}}):
        with pytest.raises(ConfigError, match="damaged"):
            Budgets(GDP, SERVER).restore(nonsense)


def test_each_client_has_a_budget_of_its_own_and_the_aggregate_one() -> None:
    budgets = Budgets(GDP, SERVER)
    assert budgets.spent_fraction == 0
    budgets.of(3).spend(Gaussian(GDP.mu))
    budgets.of(4).spend(Gaussian(GDP.share(2)))
    assert budgets.of(3) is budgets.of(3)
    assert (budgets.of(3).spent_fraction, budgets.spent_fraction) == (1.0, 1.0)
    with pytest.raises(ConfigError, match="client -1"):
        budgets.of(AGGREGATE)
    whole = Budgets(GDP, SUM)
    whole.of(AGGREGATE).spend(Gaussian(0.1))
    with pytest.raises(ConfigError, match="do not add up"):
        whole.of(0)


def test_a_resumed_run_starts_from_what_the_ledger_says(tmp_path: Path) -> None:
    share = Gaussian(GDP.share(4))
    with Ledger.create(tmp_path / "l.db", "r1") as ledger:
        budgets = Budgets(GDP, SERVER)
        for client in (0, 1, 0):
            budgets.of(client).check(share)
            ledger.charge(entry(share, client))
            budgets.of(client).spend(share)
        ledger.charge(entry(share, 1))  # killed before it could spend and hand over: an over-count
    with Ledger.open(tmp_path / "l.db") as ledger:
        resumed = Budgets(GDP, SERVER)
        resumed.replay(ledger.entries())
        resumed.replay(ledger.entries())
        assert resumed.of(0).spent == budgets.of(0).spent
        assert resumed.of(1).spent == 2 * budgets.of(1).spent


def test_charging_checks_and_writes_all_or_nothing(tmp_path: Path) -> None:
    share = Gaussian(GDP.share(4))
    with Ledger.create(tmp_path / "l.db", "r1") as ledger:
        budgets = Budgets(GDP, SERVER)
        assert budgets.charge(ledger, [entry(share, 0), entry(share, 1), entry(share, 0)]) == [1, 2, 3]
        before = budgets.state()
        with pytest.raises(BudgetExhausted):
            budgets.charge(ledger, [entry(share, 1), entry(share, 0), entry(share, 0), entry(share, 0)])
        with pytest.raises(ConfigError, match="these budgets are for"):
            budgets.charge(ledger, [entry(share, 1), entry(share, 0, replace(SERVER, unit=Unit.RECORD))])
        assert (len(ledger), budgets.state()) == (3, before)
        assert budgets.charge(ledger, [entry(share, 0), entry(share, 0)]) == [4, 5]
        with pytest.raises(BudgetExhausted):
            budgets.charge(ledger, [entry(share, 0)])
        assert budgets.charge(ledger, []) == []


def test_processes_that_share_a_ledger_share_the_budget(tmp_path: Path) -> None:
    """Four processes charge the same two clients as fast as they can; together they get exactly the cap."""
    path, share = tmp_path / "l.db", Gaussian(GDP.share(25))
    Ledger.create(path, "r1").close()
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            try:
                with Ledger.open(path) as ledger:
                    budgets, left = Budgets(GDP, SERVER), {0, 1}
                    while left:
                        for client in sorted(left):
                            try:
                                budgets.charge(ledger, [entry(share, client)])
                            except BudgetExhausted:
                                left.remove(client)
                os._exit(0)
            except BaseException:
                Path(tmp_path, f"failure-{os.getpid()}").write_text(traceback.format_exc())
            finally:
                os._exit(1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * 4, "\n".join(file.read_text() for file in tmp_path.glob("failure-*"))
    with Ledger.open(path) as ledger:
        clients = [row.client for _, _, row in ledger.entries()]
    assert sorted(clients) == [0] * 25 + [1] * 25


# --- adversarial policies ---------------------------------------------------------------------------------------------

ORDER = 8
EPSILON, DELTA = 1.5, 1e-5
MOVES = ("all", "above", "half", "share", "tiny", "dust", "zero", "huge", "many", "given", "replay", "restore")
policies = st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 2), st.floats(0, 10, allow_subnormal=True)), max_size=40)


def adversarial_mu(move: str, left: Fraction, value: float) -> Gaussian:
    """A cost chosen from what is left of the cap on mu^2, at and around the edges of floating point."""
    root = math.sqrt(float(max(left, Fraction(0))))
    costs = {
        "all": Gaussian(root),
        "above": Gaussian(math.nextafter(root, math.inf)),
        "half": Gaussian(root / math.sqrt(2)),
        "share": Gaussian(root / 10, 100),
        "tiny": Gaussian(5e-324, 2**62),
        "dust": Gaussian(1e-9, 10**18),
        "zero": Gaussian(0.0),
        "huge": Gaussian(1e100),
        "many": Gaussian(root * 1e-9, 10**18),
    }
    return costs.get(move, Gaussian(value * root / 10))


def attack(budgets: Budgets, policy: Sequence[tuple[str, int, float]], exact: Fraction, ledger: Ledger) -> dict[int, list[Event]]:
    """Play a policy that sees all budgets; returns what got out, by client. `exact`: mu^2 of the whole budget."""
    out: dict[int, list[Event]] = {}
    for number, (move, client, value) in enumerate(policy):
        budget = budgets.of(client)
        if move == "restore":
            budgets.restore(json.loads(json.dumps(budgets.state())))
        elif move == "replay":
            budgets = Budgets(budgets.filter, budgets.scope)
            budgets.replay(ledger.entries())
        else:
            left = exact * (1 - budget.spent / budget.filter.limit)
            event: Event = adversarial_mu(move, left, value)
            if isinstance(budget.filter, RdpFilter) and number % 2 and isinstance(event, Gaussian) and 1e-100 < event.mu < 1e100:
                event = SampledGaussian(min(1.0, value), 1 / event.mu, event.count)
            try:
                budget.check(event)
            except BudgetExhausted:
                continue
            ledger.charge(entry(event, client, budgets.scope))
            budget.spend(event)
            out.setdefault(client, []).append(event)
    return out


def exact_gaussian_delta(events: Sequence[Event]) -> mp.mpf:
    total = sum((event.count * Fraction(event.mu) ** 2 for event in events if isinstance(event, Gaussian)), Fraction(0))
    mu = mp.sqrt(
        max(mp.mpf(total.numerator) / total.denominator, mp.mpf("1e-6"))
    )  # delta is monotone in mu, and 0 to 60 digits there
    return mp.ncdf(-EPSILON / mu + mu / 2) - mp.exp(EPSILON) * mp.ncdf(-EPSILON / mu - mu / 2)


def exact_renyi_epsilon(events: Sequence[Event]) -> mp.mpf:
    """Exact binomial sums at an integer order, converted by Canonne, Kamath & Steinke 2020."""
    total, a = mp.mpf(0), mp.mpf(ORDER)
    for event in events:
        if isinstance(event, Gaussian):
            total += event.count * a * mp.mpf(event.mu) ** 2 / 2
        elif isinstance(event, SampledGaussian):
            q, z = mp.mpf(event.rate), mp.mpf(event.noise_multiplier)
            terms = (
                math.comb(ORDER, k) * (1 - q) ** (ORDER - k) * q**k * mp.expm1((k * k - k) / (2 * z * z))
                for k in range(2, ORDER + 1)
            )
            total += event.count * mp.log1p(mp.fsum(terms)) / (a - 1)
    return total + mp.log1p(-1 / a) - (mp.log(DELTA) + mp.log(a)) / (a - 1)


@settings(max_examples=50, deadline=None)
@given(policy=policies)
@pytest.mark.heavy
def test_no_adversarial_policy_exceeds_a_gdp_cap(
    policy: list[tuple[str, int, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rule = GdpFilter(EPSILON, DELTA)
    with Ledger.create(tmp_path_factory.mktemp("gdp") / "l.db", "r1") as ledger:
        out = attack(Budgets(rule, SERVER), policy, rule.limit, ledger)
    with mp.workdps(60):
        assert all(exact_gaussian_delta(events) <= DELTA for events in out.values())


@settings(max_examples=50, deadline=None)
@given(policy=policies)
@pytest.mark.heavy
def test_no_adversarial_policy_exceeds_a_renyi_cap(
    policy: list[tuple[str, int, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rule = RdpFilter(EPSILON, DELTA, ORDER)
    exact = 2 * rule.limit / ORDER
    with Ledger.create(tmp_path_factory.mktemp("rdp") / "l.db", "r1") as ledger:
        out = attack(Budgets(rule, SUM), policy, exact, ledger)
    with mp.workdps(60):
        assert all(exact_renyi_epsilon(events) <= EPSILON for events in out.values())


class FloatFilter:
    """A tempting mistake: the cap of a GDP filter, with each cost rounded so that tiny ones vanish next to the cap."""

    quotes = "wrong"
    limit = GdpFilter(EPSILON, DELTA).limit

    def cost(self, event: Event, adjacency: Adjacency) -> Fraction:
        assert isinstance(event, Gaussian)
        return Fraction(0) if event.mu**2 < 1e-16 else event.count * Fraction(event.mu) ** 2


class DoubledCap:
    """Another: sensitivity off by two."""

    quotes = "wrong"
    limit = 4 * GdpFilter(EPSILON, DELTA).limit

    def cost(self, event: Event, adjacency: Adjacency) -> Fraction:
        return GdpFilter(EPSILON, DELTA).cost(event, adjacency)


@pytest.mark.parametrize(("wrong", "policy"), [(FloatFilter(), [("dust", 0, 0.0)]), (DoubledCap(), [("all", 0, 0.0)])])
def test_the_same_policies_do_break_wrong_filters(wrong: Filter, policy: list[tuple[str, int, float]], tmp_path: Path) -> None:
    sound = GdpFilter(EPSILON, DELTA)
    for rule, delta_holds in ((wrong, False), (sound, True)):
        with Ledger.create(tmp_path / f"{delta_holds}.db", "r1") as ledger:
            out = attack(Budgets(rule, SERVER), [("all", 0, 0.0), *policy], rule.limit, ledger)
        with mp.workdps(60):
            assert (exact_gaussian_delta(out.get(0, [])) <= DELTA) is delta_holds


def test_floating_point_sums_would_drift_where_the_budget_does_not() -> None:
    """After the whole cap, a float sum no longer notices releases of mu = 1e-9; the budget refuses the first."""
    budget = Budget(GDP, SERVER)
    budget.spend(Gaussian(GDP.mu))
    naive = GDP.mu**2
    assert naive + 1e-9**2 == naive
    with pytest.raises(BudgetExhausted):
        budget.spend(Gaussian(1e-9))
