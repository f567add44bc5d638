"""Lifetime budgets: caps that hold over projects and processes, killed or not; what is spent and what is left."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import mpmath as mp
import pytest
from typer.testing import CliRunner

from fedveil.accounting.types import Adjacency, Event, Gaussian, SampledGaussian, Scope, Unbounded, Unit, View
from fedveil.cli.app import app
from fedveil.errors import BudgetExhausted, ConfigError, LedgerError
from fedveil.ledger.budget import AGGREGATE, Budgets, GdpFilter, best_order
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.ledger.ledger import Entry, Ledger, Row
from fedveil.ledger.population_budget import PopulationBudget, create_budget, open_budget, rounded_down, spending

SERVER = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.SERVER)
SUM = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
EPSILON, DELTA = 2.0, 1e-5
CAP = GdpFilter(EPSILON, DELTA)
TENTH = Gaussian(CAP.share(10))


def entry(event: Event, client: int = 0, scope: Scope = SERVER, round: int = 0) -> Entry:
    numbers = {"clip": (1.0,), "noise_std": (1.0,), "coordinates": 1, "dimension": 1, "participants": 1}
    return Entry("r1", round, client, scope.unit, scope.adjacency, scope.view, event, **numbers)  # type: ignore[arg-type]


@pytest.fixture
def budget(tmp_path: Path) -> PopulationBudget:
    return create_budget(tmp_path / "people.budget", EPSILON, DELTA, SERVER)


def own_ledger(budget: PopulationBudget, name: str, budgets: Budgets | None = None) -> BudgetedLedger:
    """The ledger of a new run that shares the budget."""
    path = budget.path.with_name(f"{name.replace('/', '-')}.sqlite")
    if not path.exists():
        Ledger.create(path, name).close()
    return BudgetedLedger(path, budgets, population=budget.ledger(name))


def rows(path: Path) -> list[Entry]:
    with Ledger.open(path) as ledger:
        return [row for _, _, row in ledger.entries()]


@pytest.mark.parametrize("order", [None, 12.5])
def test_an_opened_budget_is_the_created_one(tmp_path: Path, order: float | None) -> None:
    made = create_budget(tmp_path / "b", EPSILON, DELTA, SUM, order)
    assert open_budget(tmp_path / "b") == made
    assert (made.cap.epsilon, made.cap.delta) == (EPSILON, DELTA)
    assert made.cap.limit == open_budget(tmp_path / "b").cap.limit
    with pytest.raises(LedgerError, match="never overwritten"):
        create_budget(tmp_path / "b", 100.0, DELTA, SUM)


def test_what_is_no_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="fedveil budget create"):
        open_budget(tmp_path / "none")
    Ledger.create(tmp_path / "run.sqlite", "r1", {"method": "dp-fedavg"}).close()
    with pytest.raises(LedgerError, match="no budget that runs share"):
        open_budget(tmp_path / "run.sqlite")
    for epsilon in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="> 0"):
            create_budget(tmp_path / "b", epsilon, DELTA, SUM)
    with pytest.raises(ConfigError, match="delta"):
        create_budget(tmp_path / "b", 1.0, 2.0, SUM)
    assert not (tmp_path / "b").exists()


def test_another_unit_adjacency_or_view_is_refused(budget: PopulationBudget) -> None:
    for other in (
        replace(SERVER, view=View.FINAL),
        replace(SERVER, unit=Unit.RECORD),
        replace(SERVER, adjacency=Adjacency.REPLACE_ONE),
    ):
        with pytest.raises(ConfigError, match="do not add up"):
            budget.check_scope(other)
        with pytest.raises(ConfigError, match="these budgets are for"):
            budget.ledger("r").charge_all([entry(TENTH, 0, other)])
    budget.check_scope(SERVER)
    assert rows(budget.path) == []


def test_runs_share_the_cap_of_each_client(budget: PopulationBudget) -> None:
    ledgers = [own_ledger(budget, name) for name in ("a", "b")]
    for number in range(10):
        ledgers[number % 2].charge_all([entry(TENTH, 7)])
    for ledger in ledgers:
        with pytest.raises(BudgetExhausted, match=r"privacy.budget: .*epsilon = 2 .*100.0000% spent"):
            ledger.charge_all([entry(Gaussian(1e-5), 7)])
        assert not ledger.admits(7, Gaussian(1e-5))
        assert ledger.admits(8, TENTH)
        ledger.charge_all([entry(TENTH, 8)])
        ledger.close()
    shared = rows(budget.path)
    assert [row.run for row in shared] == ["a", "b"] * 6
    assert [len(rows(ledger.path)) for ledger in ledgers] == [6, 6]


def test_a_long_ledger_is_read_before_the_lock_is_taken(budget: PopulationBudget, monkeypatch: pytest.MonkeyPatch) -> None:
    first = budget.ledger("a")
    for _ in range(4):
        first.charge_all([entry(TENTH)])
    first.close()
    read, real, locked = [], Ledger.entries, [False]

    def entries(self: Ledger, since: int = 0) -> Iterator[Row]:
        for row in real(self, since):
            read.append(locked[0])
            yield row

    def append(self: Ledger, *args: Any) -> Any:
        locked[0] = True
        return appended(self, *args)

    appended = Ledger._append
    monkeypatch.setattr(Ledger, "entries", entries)
    monkeypatch.setattr(Ledger, "_append", append)
    later = budget.ledger("b")
    later.charge_all([entry(TENTH)])
    later.close()
    assert read == [False] * 4


def test_what_the_own_budget_refuses_is_not_charged_to_the_population(budget: PopulationBudget) -> None:
    ledger = own_ledger(budget, "a", Budgets(GdpFilter.from_mu(TENTH.mu, DELTA), SERVER))
    ledger.charge_all([entry(TENTH)])
    with pytest.raises(BudgetExhausted):
        ledger.charge_all([entry(TENTH)])
    ledger.close()
    assert len(rows(budget.path)) == len(rows(ledger.path)) == 1


def test_a_crash_between_the_two_charges_over_counts(budget: PopulationBudget, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = own_ledger(budget, "a")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(BudgetedLedger, "_charge", lambda self, entry: stop() if self is ledger else charged(self, entry))
        ledger.charge_all([entry(TENTH)])
    assert (len(rows(budget.path)), len(rows(ledger.path))) == (1, 0)
    ledger.charge_all([entry(TENTH)])  # fresh noise: another release
    assert (len(rows(budget.path)), len(rows(ledger.path))) == (2, 1)
    ledger.close()


charged = BudgetedLedger._charge


def stop() -> NoReturn:
    raise KeyboardInterrupt


def test_the_same_bits_again_are_charged_once_in_both(budget: PopulationBudget, monkeypatch: pytest.MonkeyPatch) -> None:
    others = own_ledger(budget, "b")
    others.charge_once(entry(TENTH), digest="beef")
    ledger = own_ledger(budget, "a")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(BudgetedLedger, "_charge", lambda self, entry: stop() if self is ledger else charged(self, entry))
        ledger.charge_once(entry(TENTH), digest="abcd")
    ledger.close()
    resumed = own_ledger(budget, "a")
    for _ in range(2):
        resumed.charge_once(entry(TENTH), digest="abcd")
    assert ([row.run for row in rows(budget.path)], len(rows(ledger.path))) == (["b", "a"], 1)
    with pytest.raises(LedgerError, match="released before"):
        resumed.charge_once(entry(TENTH), digest="other")
    for each in (others, resumed):
        each.close()


# --- before training --------------------------------------------------------------------------------------------------


def test_a_plan_is_held_against_what_is_left_to_the_bit(budget: PopulationBudget) -> None:
    ledger = budget.ledger("a")
    for _ in range(4):
        ledger.charge_all([entry(TENTH, 3)])
    ledger.close()
    budget.check_plan([replace(TENTH, count=6)], "b", range(5))
    budget.check_plan([replace(TENTH, count=10)], "b", range(3))  # client 3 takes no part
    with pytest.raises(BudgetExhausted) as caught:
        budget.check_plan([replace(TENTH, count=6), Gaussian(1e-5)], "b", range(5))
    for part in ("60.00", "60.0000% of client 3 is left", "budget show", str(budget.path), "Nothing was trained"):
        assert part in str(caught.value)
    left = float(str(caught.value).split("which is epsilon = ")[1].split()[0])
    with mp.workdps(40):  # the exact delta of what is left, at that epsilon and just above
        mu = mp.sqrt(mp.mpf(6) / 10) * mp.mpf(CAP.mu)
        assert delta_of(left, mu) >= DELTA >= delta_of(left * 1.001, mu)
    with pytest.raises(BudgetExhausted, match=r"100.0000% is left"):
        budget.check_plan([replace(TENTH, count=11)], "b", range(100, 110))


def delta_of(epsilon: float, mu: mp.mpf) -> mp.mpf:
    e = mp.mpf(epsilon)
    return mp.ncdf(-e / mu + mu / 2) - mp.exp(e) * mp.ncdf(-e / mu - mu / 2)


def test_a_run_that_goes_on_is_not_asked_twice_for_what_it_charged(budget: PopulationBudget) -> None:
    for run, releases in (("a", 3), ("b", 5)):
        ledger = budget.ledger(run)
        for _ in range(releases):
            ledger.charge_all([entry(TENTH)])
        ledger.close()
    budget.check_plan([replace(TENTH, count=5)], "a", range(3))
    with pytest.raises(BudgetExhausted):
        budget.check_plan([replace(TENTH, count=6)], "a", range(3))
    with pytest.raises(BudgetExhausted):
        budget.check_plan([replace(TENTH, count=5)], "c", range(3))


def test_what_has_no_bound_is_refused_before_training(budget: PopulationBudget) -> None:
    with pytest.raises(BudgetExhausted, match=r"unbounded cost \(no noise\)"):
        budget.check_plan([Unbounded("no noise")], "a", range(3))


def test_secret_samples_cost_more_without_an_order(tmp_path: Path) -> None:
    plan = [SampledGaussian(0.01, 1.0, 100)]
    with pytest.raises(BudgetExhausted):
        create_budget(tmp_path / "gdp", EPSILON, DELTA, SUM).check_plan(plan, "a", (AGGREGATE,))
    create_budget(tmp_path / "renyi", EPSILON, DELTA, SUM, best_order(EPSILON, DELTA, plan, SUM.adjacency)).check_plan(
        plan, "a", (AGGREGATE,)
    )


# --- what is spent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [None, 16.0])
def test_projects_are_priced_alone_and_together(tmp_path: Path, order: float | None) -> None:
    budget = create_budget(tmp_path / "b", EPSILON, DELTA, SUM, order)
    nothing = spending(budget)
    assert (nothing.rows, nothing.epsilon, nothing.spent, nothing.projects) == (0, 0.0, 0.0, ())
    assert nothing.left == pytest.approx(EPSILON, rel=1e-3)
    part = Gaussian(float(mp.sqrt(mp.mpf(2) * budget.cap.limit / 16 / 8))) if order else Gaussian(CAP.share(8))
    for run, releases in (("tuning/1", 1), ("tuning/2", 2), ("final", 4)):
        ledger = budget.ledger(run)
        for _ in range(releases):
            ledger.charge_all([entry(part, AGGREGATE, SUM)])
        ledger.close()
    found = spending(budget)
    assert [(p.name, p.runs, p.rows) for p in found.projects] == [("tuning", 2, 3), ("final", 1, 4)]
    assert [p.spent for p in found.projects] == [pytest.approx(3 / 8), pytest.approx(4 / 8)]
    assert (found.rows, found.clients, found.most, found.spent) == (7, 0, AGGREGATE, pytest.approx(7 / 8))
    assert max(p.epsilon for p in found.projects) < found.epsilon < EPSILON
    # a further project of what is left fits, and one a little larger does not
    for factor, fits in ((1.0, True), (1.002, False)):
        cap = create_budget(tmp_path / f"next-{factor}", found.left * factor, DELTA, SUM, order).cap
        mu = float(mp.sqrt(cap.limit if order is None else 2 * cap.limit / 16)) * (1 - 1e-12)
        assert budget.ledger("next").admits(AGGREGATE, Gaussian(mu)) is fits


def test_the_epsilon_of_everything_spent_is_the_cap(budget: PopulationBudget) -> None:
    assert budget.epsilon(budget.cap.limit) == pytest.approx(EPSILON, rel=1e-9)
    assert budget.epsilon(Fraction(0)) == 0
    assert rounded_down(1.99999) == 1.999
    assert rounded_down(123456.0) == 123400.0
    assert rounded_down(0.0) == 0


def test_commands(tmp_path: Path) -> None:
    path, run = tmp_path / "people.budget", CliRunner()
    made = run.invoke(app, ["budget", "create", str(path), "--epsilon", "2", "--delta", "1e-5", "--view", "server"])
    assert made.exit_code == 0
    assert "epsilon = 2 at delta = 1e-5" in made.output
    assert open_budget(path).scope == SERVER
    assert "no release yet" in run.invoke(app, ["budget", "show", str(path)]).output
    ledger = open_budget(path).ledger("pilot/7")
    ledger.charge_all([entry(TENTH, 4)])
    ledger.close()
    text = run.invoke(app, ["budget", "show", str(path)]).output
    assert "pilot" in text
    assert "left of client 4, who has least left of the 1 that took part: 90.0000%" in text
    values = json.loads(run.invoke(app, ["budget", "show", str(path), "--json"]).output)
    assert values["cap"] == {
        "epsilon": 2.0,
        "delta": 1e-5,
        "order": None,
        "unit": "client",
        "adjacency": "zero_out",
        "view": "server",
    }
    assert values["projects"] == [
        {"name": "pilot", "runs": 1, "rows": 1, "epsilon": pytest.approx(values["epsilon"]), "spent": pytest.approx(0.1)}
    ]


# --- kills ------------------------------------------------------------------------------------------------------------

CLIENTS, UPLOADS = 3, 12
AT_ONCE = 8


def release_all(budget: PopulationBudget, name: str, out: Path, last: bool) -> NoReturn:
    """A run that charges and hands over its uploads, but for those that are refused; all but the last await their death."""
    code = 1
    try:
        handed = os.open(out, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        ledger = own_ledger(budget, name)
        for number in range(1 + max(map(int, out.read_text().split()), default=-1), UPLOADS):
            with suppress(BudgetExhausted):
                ledger.charge_all([entry(TENTH, number % CLIENTS, round=number)])
                os.write(handed, b"%d\n" % number)
        while not last:
            signal.pause()
        ledger.close()
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize(
    ("runs", "most"), [pytest.param(10, 1, marks=pytest.mark.heavy), pytest.param(24, 2, marks=pytest.mark.slow)]
)
def test_killed_runs_of_many_processes_never_exceed_the_cap(
    runs: int, most: int, budget: PopulationBudget, tmp_path: Path
) -> None:
    """The runs, 8 at once, ask for four releases of each client each, of which 10 fit; each is killed so often, and goes on."""
    dice, names, running = random.Random(5), [f"run-{n}" for n in range(runs)], dict[int, tuple[str, float]]()
    kills, waiting = Counter[str](), list(names)
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = waiting.pop(0)
            last = kills[name] == most
            child = os.fork()
            if child == 0:
                release_all(budget, name, tmp_path / f"{name}.out", last)
            running[child] = name, time.monotonic() + (math.inf if last else dice.uniform(0, 0.2))
        time.sleep(0.002)
        for child, (name, due) in list(running.items()):
            dies = time.monotonic() > due
            if dies:
                os.kill(child, signal.SIGKILL)
            found, status = os.waitpid(child, 0 if dies else os.WNOHANG)
            if found:
                del running[child]
                assert status == (signal.SIGKILL if due < math.inf else 0)
                kills[name] += status == signal.SIGKILL
                waiting += [name] if status else []
    shared = rows(budget.path)
    for client in range(CLIENTS):
        assert sum(row.client == client for row in shared) == 10  # the cap is reached, and not passed
        spent = sum(Fraction(row.event.mu) ** 2 for row in shared if row.client == client)  # type: ignore[union-attr]
        assert spent <= budget.cap.limit
    lost = 0
    for name in names:
        handed, own = [int(n) for n in (tmp_path / f"{name}.out").read_text().split()], rows(tmp_path / f"{name}.sqlite")
        kept, charged = Counter(row.round for row in own), Counter(row.round for row in shared if row.run == name)
        assert set(handed) <= set(kept)
        assert kept <= charged
        lost += charged.total() - len(handed)
    assert kills == dict.fromkeys(names, most)
    assert lost < len(shared)


CONFIG = """
data = {{ name = "digits", partition = {{ kind = "iid", clients = 6 }} }}
model = {{ name = "linear" }}
method = {{ name = "dp-fedavg", clip = 0.5 }}
training = {{ rounds = 8, clients_per_round = 6 }}
privacy = {{ epsilon = 0.6, delta = 1e-3, view = "server", budget = "people.budget" }}
run = {{ engine = "inline", name = "project {project}" }}
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_forty_runs_in_eight_processes_with_kills_never_exceed_the_cap(tmp_path: Path) -> None:
    """Whole runs by the command line; a killed one is resumed. What is charged is what left, and never above the cap."""
    budget = create_budget(tmp_path / "people.budget", 2.0, 1e-3, SERVER)
    dice, kills, codes = random.Random(9), 0, dict[int, int]()
    waiting, running = list(range(40)), dict[int, subprocess.Popen[bytes]]()
    due: dict[int, float] = {}
    while waiting or running:
        while waiting and len(running) < 8:
            number = waiting.pop(0)
            out, config = tmp_path / f"run-{number}", tmp_path / f"{number}.toml"
            config.write_text(CONFIG.format(project=number % 4))
            begun = (out / "ledger.sqlite").exists()
            what = ["--resume", str(out)] if begun else [str(config), "--out", str(out)]
            running[number] = subprocess.Popen(
                [sys.executable, "-m", "fedveil", "run", "--quiet", *what], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            due[number] = time.monotonic() + dice.uniform(2, 30) if kills < 60 else float("inf")
        time.sleep(0.02)
        for number, process in list(running.items()):
            if process.poll() is None and time.monotonic() > due[number]:
                process.kill()
                kills += 1
            if process.poll() is None:
                continue
            error = process.communicate()[1].decode()
            code = process.returncode
            del running[number]
            if code == -signal.SIGKILL:
                waiting.append(number)
            else:
                assert code in (0, 3) or (code == 2 and ("of the budget" in error or "nothing to resume" in error)), error
                codes[number] = code
    shared = rows(budget.path)
    for client in range(6):
        spent = sum(Fraction(row.event.mu) ** 2 for row in shared if row.client == client)  # type: ignore[union-attr]
        assert 0 < spent <= budget.cap.limit
    for number in range(40):
        ledger = tmp_path / f"run-{number}" / "ledger.sqlite"
        own = [(row.round, row.client) for row in rows(ledger)] if ledger.exists() else []
        run_id = {row.run for row in rows(ledger)} if own else set()
        charged = [(row.round, row.client) for row in shared if run_id and row.run.rpartition("/")[2] in run_id]
        assert all(charged.count(upload) >= own.count(upload) for upload in set(own))
    assert kills >= 20
    assert 0 in codes.values()
    assert 2 in codes.values()
    found = spending(budget)
    assert found.spent <= 1
    assert {project.name for project in found.projects} <= {f"project {n}" for n in range(4)}


def test_every_run_that_begins_ends_whatever_the_order_of_their_releases(budget: PopulationBudget) -> None:
    """24 runs of four releases each, of which the budget has room for two and a half."""
    begun, order = dict[str, int](), random.Random(5)
    for number in range(24):
        with suppress(BudgetExhausted):
            budget.reserve([([TENTH] * 4, range(3))], f"run-{number}")
            begun[f"run-{number}"] = 4
    assert len(begun) == 2
    while begun:
        name = order.choice(list(begun))
        ledger = budget.ledger(name)
        ledger.charge_all([entry(TENTH, client) for client in range(3)])
        ledger.close()
        begun[name] -= 1
        if not begun[name]:
            assert budget.give_back(name)
            del begun[name]
    assert len(rows(budget.path)) == 24
    assert spending(budget).reserved == ()
    with pytest.raises(BudgetExhausted, match=r"20.0000% of client \d is left,"):
        budget.reserve([([TENTH] * 3, range(3))], "late")
    budget.reserve([([TENTH] * 2, range(3))], "small")


def test_reservations_of_other_clients_are_no_obstacle(budget: PopulationBudget) -> None:
    budget.reserve([([TENTH] * 10, range(3))], "first")
    budget.reserve([([TENTH] * 10, range(3, 6))], "second")
    with pytest.raises(BudgetExhausted, match=r"0.0000% is left \(other runs have reserved 100.0000%\)"):
        budget.reserve([([TENTH], frozenset({1, 7}))], "third")
    budget.reserve([([TENTH], frozenset({7}))], "third")
    budget.reserve([([TENTH] * 10, range(3))], "first")  # again, as when it is resumed


def test_a_damaged_reservation_file_names_itself(budget: PopulationBudget) -> None:
    budget.reserve([([TENTH], range(3))], "first")
    budget.path.with_name(budget.path.name + "-reserved").write_text("{")
    with pytest.raises(LedgerError, match="no release; remove it"):
        budget.reserve([([TENTH], range(3))], "second")


def test_processes_that_reserve_at_once_share_what_there_is(budget: PopulationBudget) -> None:
    program = (
        "import sys; from fedveil.ledger.population_budget import open_budget; from fedveil.accounting.types import Gaussian;"
        "open_budget(sys.argv[1]).reserve([([Gaussian(float(sys.argv[3]))] * 4, range(3))], sys.argv[2])"
    )
    words = [sys.executable, "-c", program, str(budget.path)]
    started = [subprocess.Popen([*words, str(number), str(TENTH.mu)], stderr=subprocess.DEVNULL) for number in range(5)]
    assert sorted(process.wait() for process in started) == [0, 0, 1, 1, 1]
    assert len(spending(budget).reserved) == 2
