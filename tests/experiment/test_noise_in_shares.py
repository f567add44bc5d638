"""Noise in shares, with and without masks: the bits of a run, its price, its noise, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import fedveil as fv
from federation_runs import small_digits
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import View
from fedveil.experiment.certify import certify
from fedveil.federation import round as rounds
from fedveil.ledger.ledger import Ledger
from fedveil.mechanism.plan import in_shares
from fedveil.methods.base import Fixed, MethodConfig, Release, Setting, gaussian_plan
from fedveil.secure_aggregation import masks, member
from fedveil.statement.statement_layout import to_markdown
from method_kit import setting

N, C, T, Z = 6, 2, 3, 1.5


def shared(method: Any = "dp-fedavg", *, simulate: bool = False, **changes: Any) -> fv.Federation:
    sections: dict[str, dict[str, Any]] = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": N}},
        "training": {"rounds": T, "batch_size": 50},
        "privacy": {"noise_multiplier": Z, "delta": 1e-3, "noise_place": "shares", "colluders": C},
        "run": {"seeded_noise": True, "engine": "inline", "secure_aggregation": "simulate" if simulate else "none"},
    }
    model = changes.pop("model", "linear")
    for name, more in changes.items():
        sections[name] |= more
    return fv.Federation(method=method, model=model, **sections)


CASES: dict[str, tuple[Any, dict[str, dict[str, Any]]]] = {
    "full rounds": ("dp-fedavg", {}),
    "fixed cohorts": ("dp-fedavg", {"training": {"rounds": T, "clients_per_round": 5}}),
    "adaptive clipping": ("adaptive-clipping", {}),
    "counts beside the update": (
        "dp-fedavg",
        {
            "data": {"name": "digits", "partition": {"kind": "iid", "clients": N}, "client_test_fraction": 0.3},
            "privacy": {"evaluation": {"share": 0.1, "examples": 20}},
        },
    ),
    "few bits": ("dp-fedavg", {"privacy": {"grid_bits": 4}}),
}


@pytest.mark.parametrize("case", CASES)
def test_masks_change_no_bit_of_a_run(case: str, tmp_path: Path) -> None:
    method, changes = CASES[case]
    runs = [
        shared(method, simulate=simulate, **changes).fit(small_digits(), out=tmp_path / f"{simulate}", seed=3)
        for simulate in (False, True)
    ]
    for name in ("model.safetensors", "history.csv"):
        plain, masked = ((tmp_path / f"{simulate}" / name).read_bytes() for simulate in (False, True))
        assert plain == masked
    for run, simulate in zip(runs, (False, True), strict=True):
        assert run.verify(), run.verify()
        with Ledger.open(tmp_path / f"{simulate}" / "ledger.sqlite") as ledger:
            rows = [entry for _, _, entry in ledger.entries()]
        n = changes.get("training", {}).get("clients_per_round", N)
        assert [(row.round, row.participants) for row in rows] == [(t, n) for t in range(T)]
        assert all(math.isclose(row.event.mu, 1 / Z, rel_tol=1e-9) and row.event.mu <= 1 / Z for row in rows)  # type: ignore


def test_a_module_of_ones_own_is_rehearsed_and_masked(tmp_path: Path) -> None:
    from torch import nn

    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    run = shared(simulate=True, model=net).fit(small_digits(), out=tmp_path / "run", seed=3)  # type: ignore
    assert run.verify()


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (masks.np, "subtract", np.add),
        (member, "mask_key", lambda *names: np.random.default_rng().bytes(32)),
    ],
)
def test_a_fault_in_the_masks_ends_the_run(
    where: Any, name: str, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that is not subtracted, or a key that does not come from the pair alone."""
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(fv.FedveilError, match="the masked sum of round 0 cannot be opened"):
        shared(simulate=True).fit(small_digits(), out=tmp_path / "run", seed=3)


def test_the_noise_of_a_sum_is_what_the_honest_clients_are_priced_for(tmp_path: Path) -> None:
    """With steps of length 0 the mean is noise alone: n shares, of which n - c amount to z C."""
    still = {"training": {"rounds": T, "optimizer": {"name": "sgd", "lr": 1e-30}}}
    for place, factor in (("sum", 1.0), ("shares", math.sqrt(N / (N - C)))):
        privacy = {"noise_place": place}
        run = shared(privacy=privacy, **still).fit(small_digits(), out=tmp_path / place, seed=3)
        norms = [float(row["update_norm"]) for row in run.history]
        expected = Z * factor / N * math.sqrt(650)
        assert math.isclose(math.sqrt(np.mean(np.square(norms))), expected, rel_tol=0.08), (place, norms, expected)


@pytest.mark.parametrize(("rounds", "given", "spare"), [(3, None, 2), (40, None, 2), (41, None, 3), (200, None, 10), (3, 0, 0)])
@pytest.mark.parametrize("method", ["dp-fedavg", "adaptive-clipping"])
def test_the_price_counts_spare_attempts(method: str, rounds: int, given: int | None, spare: int) -> None:
    privacy = {} if given is None else {"spare_attempts": given}
    s = shared(method, training={"rounds": rounds}, privacy=privacy).certify()
    assert s.shares is not None
    assert s.shares.spare == spare
    exact = epsilon_of(math.sqrt(rounds + spare) / Z, 1e-3)
    assert math.isclose(s.proven.epsilon, exact, rel_tol=1e-9)
    once = shared(method, training={"rounds": rounds + spare}, privacy={"noise_place": "sum"}).certify()
    assert math.isclose(once.proven.epsilon, s.proven.epsilon, rel_tol=1e-12)
    assert once.shares is None


@pytest.mark.parametrize(("n", "c", "least"), [(6, 1, None), (6, 2, 4), (6, 2, 6), (10, 3, None), (10, 3, 9)])
def test_more_colluders_than_counted_on_cost_the_noise_that_they_know(n: int, c: int, least: int | None) -> None:
    data = {"name": "digits", "partition": {"kind": "iid", "clients": n}}
    privacy = {"colluders": c} | ({} if least is None else {"min_survivors": least})
    s = shared(data=data, privacy=privacy, simulate=True).certify()
    assert s.shares is not None
    m = s.shares.least
    assert m == (least or max(c + 2, math.ceil(n / 2)))

    def epsilon(bad: int) -> float:
        costs = [(k - c) / max(k - bad, 1) * (T + 2) / Z**2 for k in range(m, n + 1)]
        return epsilon_of(math.sqrt(max(costs)), 1e-3)

    assert math.isclose(s.shares.twice, epsilon(2 * c), rel_tol=1e-6)
    assert math.isclose(s.shares.others, epsilon(n - 1), rel_tol=1e-6)
    assert math.isclose(s.views[0].proven.epsilon, epsilon(n - 1), rel_tol=1e-6)
    assert s.proven.epsilon < s.shares.twice <= s.shares.others


def test_the_statement_says_against_whom_it_holds() -> None:
    masked, plain = (federation.certify() for federation in (shared(simulate=True), shared()))
    page, other = to_markdown(masked), to_markdown(plain)
    assert "the server if at most 2 keys of the roster are its own or of clients that work with it" in page
    assert "the promise is computational" in page
    assert "nobody can check the clip of a masked vector" in page
    assert "3 rounds and 2 spare attempts" in page
    assert "the server with all other clients on its side" in page
    assert "secure aggregation or a trusted server shows nothing" not in page
    assert "secure aggregation or a trusted server shows nothing" in other
    assert "keys of the roster" not in other
    assert "if 4 do, epsilon" in page
    assert "if 4 do, epsilon" in other


REFUSED: list[tuple[Any, dict[str, dict[str, Any]], str, str]] = [
    ("dp-fedavg", {"training": {"sampling": "poisson", "clients_per_round": 5}}, "training.sampling", "see who else is in it"),
    ("dp-fedavg", {"privacy": {"view": "server"}}, "privacy.view", "protect the sum of a round"),
    ("dp-fedavg", {"privacy": {"view": "final"}}, "privacy.view", "protect the sum of a round"),
    ("banded-mf", {}, "method.name", "the same set of clients in all of them"),
    ("time-adaptive", {}, "method.name", "the same in all"),
    (
        "noisy-fedavg",
        {"training": {"local_steps": 2, "batch_clip": 1.0}},
        "method.name",
        "the same in all",
    ),
    ("dp-fedavg", {"training": {"local": "dp-sgd", "example_clip": 1.0}}, "training.local", "holds against the server without"),
    (
        "dp-fedavg",
        {"privacy": {"noise_multiplier": None, "noise_cohort": {"clients": 100, "clients_per_round": 50, "epsilon": 2}}},
        "privacy.noise_cohort",
        "of the set that they are in",
    ),
    ("dp-fedavg", {"privacy": {"selection": {"runs": 4}}}, "privacy.selection", "members of a set see every sum"),
    ("dp-fedavg", {"privacy": {"min_survivors": 3}}, "privacy.min_survivors", "between 4 and 6"),
    ("dp-fedavg", {"privacy": {"min_survivors": 7}}, "privacy.min_survivors", "between 4 and 6"),
    ("dp-fedavg", {"privacy": {"colluders": 5}}, "training.clients_per_round", "take more clients per round"),
    ("dp-fedavg", {"training": {"clients_per_round": 3}}, "training.clients_per_round", "take more clients per round"),
    ("dp-fedavg", {"privacy": {"noise_place": "sum", "spare_attempts": 3}}, "privacy.spare_attempts", "noise_place = 'shares'"),
    (
        "dp-fedavg",
        {"privacy": {"noise_place": "sum"}, "run": {"secure_aggregation": "simulate"}},
        "run.secure_aggregation",
        "shares",
    ),
    ("dp-fedavg", {"run": {"secure_aggregation": "simulate", "engine": "pool"}}, "run.engine", "'inline'"),
]


@pytest.mark.parametrize(("method", "changes", "key", "reason"), REFUSED)
def test_what_shares_cannot_do_is_refused_with_its_reason(
    method: Any, changes: dict[str, dict[str, Any]], key: str, reason: str
) -> None:
    with pytest.raises(fv.ConfigError) as caught:
        shared(method, **changes).certify()
    assert caught.value.key == key, caught.value
    assert reason in str(caught.value)


class ByExamples(fv.DPFedAvg):
    name: Literal["by-examples"] = "by-examples"  # type: ignore[assignment]
    weighting: Literal["examples"] = "examples"


class Clamped(fv.DPFedAvg):
    name: Literal["clamped"] = "clamped"  # type: ignore[assignment]

    def release(self, s: Setting) -> Release:
        return Fixed(replace(gaussian_plan(s, self.clip), clamp=1.0))


class OwnBudgets(fv.DPFedAvg):
    name: Literal["own-budgets"] = "own-budgets"  # type: ignore[assignment]

    def client_epsilons(self, s: Setting) -> list[float]:
        return [1.0] * s.clients


@pytest.mark.parametrize(
    ("method", "key", "reason"),
    [
        (ByExamples(), "method.weighting", "tell the sizes of the clients"),
        (Clamped(), "method.name", "a clamp of shares is none of the sum"),
        (OwnBudgets(), "method.name", "clients with budgets of their own"),
    ],
)
def test_methods_of_ones_own_that_cannot_share_are_refused(method: MethodConfig, key: str, reason: str) -> None:
    s = replace(setting(View.AGGREGATE, colluders=1, cohort=10), noise_place="shares")
    with pytest.raises(fv.ConfigError) as caught:
        certify(method, s)
    assert caught.value.key == key
    assert reason in str(caught.value)


def test_shares_that_are_too_small_are_not_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: clients count on the shares of all, those who work together included."""
    monkeypatch.setattr(rounds, "in_shares", lambda plan, honest: in_shares(plan, honest + C))
    run = shared(simulate=True, privacy={"spare_attempts": 0}).fit(small_digits(), out=tmp_path / "run", seed=3)
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        spent = math.fsum(entry.event.mu**2 for _, _, entry in ledger.entries())  # type: ignore[union-attr]
    assert len(run.history) < T, "the budget of the plan is used up before its last round"
    assert spent <= T / Z**2 * (1 + 1e-5)


def test_masks_that_are_asked_for_are_never_left_out(tmp_path: Path) -> None:
    with pytest.raises(fv.ConfigError, match=r"run\.secure_aggregation = 'on' needs clients on machines of their own"):
        shared(run={"secure_aggregation": "on"}).fit(small_digits(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_replay_finds_nothing_wrong(tmp_path: Path) -> None:
    run = shared(simulate=True, training={"rounds": 2}).fit(small_digits(), out=tmp_path / "run", seed=3)
    assert run.replay()
