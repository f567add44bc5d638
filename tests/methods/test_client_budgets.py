"""Caps of single clients: a method of two groups that is defined here, and nothing of the house knows it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import method_kit as h
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import View
from fedveil.attacks.replay import replay
from fedveil.errors import BudgetExhausted, ConfigError
from fedveil.executors.inline import Inline
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.experiment.run import run
from fedveil.federation.clients import Clients
from fedveil.federation.fit import fit
from fedveil.federation.progress import start
from fedveil.ledger.budget import AGGREGATE
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.population_budget import create_budget
from fedveil.mechanism.plan import Plan, Released
from fedveil.methods.base import MethodConfig, Policy, Release, Setting, gaussian_plan
from fedveil.methods.method_registry import METHODS
from fedveil.methods.run_cost import check_declared
from fedveil.statement.statement import GroupNumbers
from fedveil.statement.statement_layout import from_dict, to_dict, to_markdown
from fedveil.training.local import State

CLIENTS, ROUNDS = 6, 8
STRICT, LOOSE = 1.0, 4.0


class TwoGroups(MethodConfig):
    """DP-FedAvg in which the first clients have epsilon 1 and the others 4; noise / `haste` spends the caps sooner."""

    name: Literal["two-groups"] = "two-groups"
    clip: float = 0.5
    strict: int = 3
    haste: float = 1.0
    hasty: int = 3

    def client_epsilons(self, s: Setting) -> Sequence[float]:
        return [STRICT] * self.strict + [LOOSE] * (s.clients - self.strict)

    def release(self, s: Setting) -> Release:
        return ByGroup(self)


@dataclass(frozen=True)
class ByGroup(Policy):
    method: TwoGroups

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        plan = gaussian_plan(s, self.method.clip)
        return replace(plan, noise_std=plan.noise_std / (self.method.haste if released.client < self.method.hasty else 1.0))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "two-groups", TwoGroups)


def config(*overrides: str, **method: Any) -> Config:
    settings = ("privacy.view=server", "privacy.epsilon=4", "run.isolation=copy", *overrides)
    return h.at_epsilon_8({"name": "two-groups", **method}, *settings, clients=CLIENTS, rounds=ROUNDS)


def charged(path: Path) -> tuple[dict[int, float], Counter[int], dict[int, set[tuple[float, ...]]]]:
    """Of each client: mu of all its rows, their number, and the noise in them."""
    rows, noise = Counter[int](), dict[int, set[tuple[float, ...]]]()
    with Ledger.open(path) as ledger:
        for _, _, entry in ledger.entries():
            rows[entry.client] += 1
            noise.setdefault(entry.client, set()).add(entry.noise_std)
    return h.charged_mu(path), rows, noise


def test_each_group_has_the_noise_of_its_own_epsilon() -> None:
    _, s = calibrated_setting(config())
    assert [(group.epsilon, sorted(group.clients)) for group in s.groups] == [(STRICT, [0, 1, 2]), (LOOSE, [3, 4, 5])]
    for client, epsilon in enumerate([STRICT] * 3 + [LOOSE] * 3):
        one = s.of(client)
        assert (one.epsilon, one.groups) == (epsilon, ())
        assert epsilon_of(math.sqrt(ROUNDS) / one.z, s.delta) == pytest.approx(epsilon, rel=1e-4)
    assert s.of(AGGREGATE) is s
    assert s.z == s.of(5).z < s.of(0).z


def test_the_statement_quotes_the_largest_and_lists_the_groups() -> None:
    statement, (_, s) = certify_config(config()), calibrated_setting(config())
    assert 3.999 < statement.proven.epsilon <= LOOSE
    strict, loose = statement.groups
    assert (strict.epsilon, strict.clients) == (pytest.approx(STRICT, rel=1e-3), 3)
    assert loose == GroupNumbers(statement.proven.epsilon, 3, statement.own.releases)
    assert [(release.count, release.mu) for release in strict.releases] == [(ROUNDS, pytest.approx(1 / s.of(0).z))]
    assert all(group.epsilon <= cap for group, cap in zip(statement.groups, (STRICT, LOOSE), strict=True))
    assert from_dict(to_dict(statement)) == statement
    page = to_markdown(statement)
    assert re.search(r"## Caps by client.*\| proven epsilon \| clients \|.*\| 1 \| 3 \|\n\| 4 \| 3 \|", page, re.DOTALL)
    alike = certify_config(h.at_epsilon_8({"name": "dp-fedavg"}, "privacy.view=server"))
    assert alike.groups == ()
    assert "Caps by client" not in to_markdown(alike)


def test_a_run_charges_each_client_up_to_its_own_cap(tmp_path: Path) -> None:
    result = run(config(), tmp_path / "run")
    assert (result.ended, len(result.history)) == ("", ROUNDS)
    mu, rows, noise = charged(tmp_path / "run" / "ledger.sqlite")
    assert rows == dict.fromkeys(range(CLIENTS), ROUNDS)
    for client in range(CLIENTS):
        cap = STRICT if client < 3 else LOOSE
        assert cap * 0.999 < epsilon_of(mu[client], 1e-3) <= cap
        assert len(noise[client]) == 1
    assert noise[0] == noise[2] != noise[3] == noise[5]
    assert [row["spent_clients"] for row in result.history] == [0] * ROUNDS


@pytest.mark.few(1)
@pytest.mark.parametrize("haste", [1.0, 2.0])
@pytest.mark.heavy
def test_replay_finds_nothing(haste: float) -> None:
    configuration = config("privacy.epsilon=4", haste=haste)
    assert replay(configuration, rounds=4).findings == {}


@pytest.mark.parametrize("engine", ["inline", "pool", "batched"])
@pytest.mark.heavy
def test_whose_cap_is_spent_takes_no_further_part_and_the_others_go_on(tmp_path: Path, engine: str) -> None:
    """Twice the mu a round: the strict clients are done after a quarter of the rounds."""
    result = run(config(f"run.engine={engine}", haste=2.0), tmp_path / "run")
    assert result.ended == ""
    assert [row["participants"] for row in result.history] == [6] * 2 + [3] * 6
    assert [row["spent_clients"] for row in result.history] == [0] * 2 + [3] * 6
    mu, rows, _ = charged(tmp_path / "run" / "ledger.sqlite")
    assert rows == {client: 2 if client < 3 else ROUNDS for client in range(CLIENTS)}
    assert all(epsilon_of(mu[client], 1e-3) <= (STRICT if client < 3 else LOOSE) for client in range(CLIENTS))


def test_the_data_of_whose_cap_is_spent_are_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, touched = h.job_of(config(haste=2.0), tmp_path / "ledger.sqlite"), []
    job = replace(job, context=replace(job.context, isolation="none"))  # this process sees what is touched
    real = Clients.examples
    monkeypatch.setattr(Clients, "examples", lambda self, client: touched.append(client) or real(self, client))
    fit(job, Inline(job.context), start(job))
    assert Counter(touched) == {client: 2 if client < 3 else ROUNDS for client in range(CLIENTS)}
    plan = job.context.policy.plan(Released(0, torch.zeros(1), None, client=0), {})
    update = torch.zeros(job.context.door.layout.dimension)
    assert not job.context.door.admits(plan, 0, ROUNDS)
    with pytest.raises(BudgetExhausted, match="epsilon = 1 "):  # whatever the round does, the door refuses
        job.context.door.upload(update, plan, 0, ROUNDS)


def test_the_sampler_leaves_them_out(tmp_path: Path) -> None:
    result = run(config("training.clients_per_round=3", haste=2.8), tmp_path / "run")
    spent = [row["spent_clients"] for row in result.history]
    assert spent == sorted(spent)
    assert spent[-1] == 3
    full = spent.index(3) + 1
    assert [row["participants"] for row in result.history[full:]] == [3] * (ROUNDS - full)


def test_a_run_of_which_nobody_is_left_ends(tmp_path: Path) -> None:
    result = run(config(haste=2.0, hasty=CLIENTS), tmp_path / "run")
    assert "every client's budget is spent" in result.ended
    assert [row["participants"] for row in result.history] == [6, 6, 0]


@pytest.mark.heavy
def test_a_resumed_run_leaves_out_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fedveil.experiment.run as module

    configuration = config("training.clients_per_round=4", haste=2.0)
    whole = run(configuration, tmp_path / "whole")
    real = module.Checkpoints.begin

    def save(self: Any, progress: Any) -> None:
        if progress.round == 6:
            raise KeyboardInterrupt
        real(self, progress)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.Checkpoints, "begin", save)
        run(configuration, tmp_path / "cut")
    again = run(configuration, tmp_path / "cut", resume=True)
    assert torch.equal(again.model.vector, whole.model.vector)
    assert whole.history[4]["spent_clients"] > 0
    for key in ("participants", "spent_clients"):
        assert [row[key] for row in again.history] == [row[key] for row in whole.history]


def test_a_population_budget_is_asked_for_each_group(tmp_path: Path) -> None:
    """What is left of client 0 is enough for the strict group, and would not be for the other."""
    scope = calibrated_setting(config())[1].scope
    budget = create_budget(tmp_path / "b", LOOSE, 1e-3, scope)
    configuration = config(f"privacy.budget={tmp_path / 'b'}", "run.seeded_noise=false")
    run(configuration, tmp_path / "one")
    with pytest.raises(BudgetExhausted, match="of client 3 is left"):
        run(configuration, tmp_path / "two")
    assert not (tmp_path / "two").exists()
    only_strict = config(*(f"privacy.budget={budget.path}", "run.seeded_noise=false", "privacy.epsilon=1"), strict=CLIENTS)
    with pytest.raises(BudgetExhausted, match="of client 3 is left"):
        run(only_strict, tmp_path / "three")


@pytest.mark.parametrize(
    ("overrides", "method", "words"),
    [
        (("privacy.view=aggregate",), {}, ["privacy.view = 'server'", "two-groups", "aggregate view"]),
        (("privacy.epsilon=5",), {}, ["privacy.epsilon = 5", "from 1 to 4"]),
        ((), {"strict": 9}, ["each of the 6 clients", "6"]),
    ],
)
def test_caps_that_fit_no_run_are_refused(overrides: tuple[str, ...], method: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        calibrated_setting(config(*overrides, **method))
    for word in words:
        assert word in str(caught.value)


def test_caps_without_a_target_are_refused() -> None:
    s = h.setting(View.SERVER, clients=CLIENTS)
    with pytest.raises(ConfigError, match=r"set privacy.epsilon to the largest"):
        check_declared(TwoGroups(), s, torch.zeros(s.layout.dimension))


def test_each_group_is_held_against_its_plans() -> None:
    """One upload that costs more than the cap of the strict group is refused, and less noise for the others is not its matter."""
    _, s = calibrated_setting(config())
    zero = torch.zeros(s.layout.dimension)
    check_declared(TwoGroups(haste=2.0), s, zero)
    with pytest.raises(ConfigError, match="correct `releases`"):
        check_declared(TwoGroups(haste=3.0), s, zero)
    with pytest.raises(ConfigError, match="correct `releases`"):
        check_declared(TwoGroups(haste=3.0, hasty=1), s, zero)
