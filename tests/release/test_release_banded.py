"""Noise correlated over the rounds: exact estimates, one release a round whatever happens, and the state that makes it so."""

from __future__ import annotations

import math
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedveil.accounting.types import Adjacency, Gaussian, Scope, Unit, View
from fedveil.errors import BudgetExhausted, ConfigError, LedgerError
from fedveil.ledger.budget import Budgets, GdpFilter
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.ledger.ledger import Entry, Ledger
from fedveil.mechanism.grid import exponent_for, to_grid
from fedveil.mechanism.mechanisms import DYADIC_BITS, Banded, Independent, NoiseMemory, Participation
from fedveil.mechanism.plan import Plan
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.training.params import Layout

Integers = NDArray[np.int64]
COEFFICIENTS = (1.0, 0.5, 384 / 1024)
RULE = Participation(2, 3)
D = 5


def banded(coefficients: tuple[float, ...] = COEFFICIENTS, rounds: int = 12, rule: Participation = RULE) -> Banded:
    return Banded(coefficients, rounds, rule)


def some_integers(rng: np.random.Generator, most: int = 2**30) -> Integers:
    return rng.integers(-most, most, D)


# --- what leaves, and what is read off it -------------------------------------------------------------------------------


@pytest.mark.parametrize("coefficients", [(1.0,), (1.0, -0.5), COEFFICIENTS, tuple((1 - j / 8) for j in range(8))])
def test_what_leaves_is_c_x_plus_z_and_without_noise_the_estimate_is_the_data(coefficients: tuple[float, ...]) -> None:
    """In integers; the estimate, in floats, is X_t (on the grid of Y, 2^10 finer) + (C^-1 Z)_t with the known Z."""
    rng, mechanism, rounds = np.random.default_rng(1), banded(coefficients, rule=Participation(2, 8)), 12
    data, noise = ([some_integers(rng) for _ in range(rounds)] for _ in range(2))
    matrix = np.array(
        [[coefficients[t - j] if 0 <= t - j < len(coefficients) else 0.0 for j in range(rounds)] for t in range(rounds)]
    )
    for known in ([np.zeros(D, np.int64)] * rounds, noise):
        memory = NoiseMemory()
        for t in range(rounds):
            released = mechanism.execute(data[t], lambda: known[t], t, memory)  # noqa: B023
            exact = [sum(int(matrix[t, j] * 2**DYADIC_BITS) * int(data[j][i]) for j in range(rounds)) for i in range(D)]
            assert released.tolist() == [e + int(z) for e, z in zip(exact, known[t], strict=True)]
            estimate = mechanism.decode(released, t, memory)
            expected = 2.0**DYADIC_BITS * data[t] + np.linalg.solve(matrix, np.array(known, dtype=np.float64))[t]
            if known is noise:
                np.testing.assert_allclose(estimate, expected, rtol=1e-12, atol=1e-3)
            else:
                assert estimate.tolist() == (data[t] * 2**DYADIC_BITS).tolist()


def test_a_round_that_is_done_again_hands_over_the_same_integers_whatever_the_data() -> None:
    rng, mechanism, memory = np.random.default_rng(2), banded(), NoiseMemory()
    for t in range(4):
        drawn: list[Integers] = []

        def noise(drawn: list[Integers] = drawn) -> Integers:
            drawn.append(some_integers(rng))
            return drawn[-1]

        first = mechanism.execute(some_integers(rng), noise, t, memory).copy()
        estimate = np.copy(mechanism.decode(first, t, memory))
        for _ in range(3):
            again = mechanism.execute(some_integers(rng), noise, t, memory)
            assert again.tolist() == first.tolist()
            assert np.asarray(mechanism.decode(again, t, memory)).tolist() == estimate.tolist()
        assert len(drawn) == 1


@pytest.mark.parametrize(("held", "asked"), [(0, 2), (1, 5), (3, 1), (3, 2), (2, 0)])
def test_the_state_of_another_round_releases_nothing(held: int, asked: int) -> None:
    rng, mechanism, memory = np.random.default_rng(3), banded(), NoiseMemory()
    for t in range(held + 1):
        mechanism.execute(some_integers(rng), lambda: some_integers(rng), t, memory)
    with pytest.raises(LedgerError, match=f"is of round {held}: round {asked} cannot be released"):
        mechanism.execute(some_integers(rng), lambda: some_integers(rng), asked, memory)


def test_without_its_state_a_later_round_releases_nothing() -> None:
    mechanism = banded()
    zero = np.zeros(D, np.int64)
    with pytest.raises(LedgerError, match="is of round -1: round 3 cannot be released"):
        mechanism.execute(zero, lambda: zero, 3, NoiseMemory())
    with pytest.raises(ConfigError, match="give the door a memory"):
        mechanism.execute(zero, lambda: zero, 0, None)


@pytest.mark.parametrize("coefficients", [(), (0.5,), (1.0, 0.3), (1.0, math.nan), (1.0, 2.0**-11)])
def test_refused_coefficients(coefficients: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="must begin with 1 and be multiples of"):
        banded(coefficients)


def test_a_band_above_the_separation_is_priced_with_its_overlaps_or_not_at_all() -> None:
    """T = 4, rounds 0 and 2: columns (1, 1/2, 3/8, 0) and (0, 0, 1, 1/2) overlap in round 2; signs could make them cancel."""
    wide = banded(rounds=4, rule=Participation(2, 2))
    assert wide.sensitivity == pytest.approx(math.sqrt(1 + 0.25 + 1.375**2 + 0.25), rel=1e-15)
    with pytest.raises(ConfigError, match="needs coefficients >= 0 that never grow"):
        banded((1.0, -0.5, 0.25), rounds=4, rule=Participation(2, 2)).price(1.0, None, 0)


def test_the_run_is_charged_once() -> None:
    """Its sensitivity by hand: two rounds of a client, three apart, whose columns do not overlap."""
    mechanism = banded((1.0, 0.5), rounds=6)
    assert mechanism.sensitivity == pytest.approx(math.sqrt(2 * 1.25), rel=1e-15)
    assert mechanism.price(0.5, None, 0) == Gaussian(0.5 * mechanism.sensitivity)
    assert mechanism.price(0.5, 0.1, 0) == Gaussian(0.5 * mechanism.sensitivity)  # sampling earns nothing
    assert {mechanism.price(0.5, None, t) for t in (1, 2, 99)} == {Gaussian(0.0)}


@pytest.mark.parametrize("round", [-1, 6, 7])
def test_a_round_beyond_those_that_were_charged_does_not_leave(round: int) -> None:
    mechanism, memory, zero = banded(rounds=6), NoiseMemory(), np.zeros(D, np.int64)
    for t in range(6):
        mechanism.execute(zero, lambda: zero, t, memory)
    with pytest.raises(ConfigError, match=f"for the rounds 0 to 5, round {round} cannot leave"):
        mechanism.execute(zero, lambda: zero, round, memory)


# --- the state on disk ---------------------------------------------------------------------------------------------------


def test_the_state_survives_the_process_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "noise-state.safetensors"
    rng, mechanism = np.random.default_rng(4), banded()
    one, other = NoiseMemory(path), NoiseMemory()
    for t in range(5):
        data, noise = some_integers(rng), some_integers(rng)
        a = mechanism.execute(data, lambda: noise, t, one)  # noqa: B023
        b = mechanism.execute(data, lambda: noise, t, other)  # noqa: B023
        assert a.tolist() == b.tolist()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        one = NoiseMemory(path)  # another process
        assert np.asarray(mechanism.decode(a, t, one)).tolist() == np.asarray(mechanism.decode(b, t, other)).tolist()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_damaged_state_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "noise-state.safetensors"
    NoiseMemory(path).write({"round": np.array([0])})
    whole = path.read_bytes()
    for content in (whole[:-3], b"", b"\xff" * 40):
        path.write_bytes(content)
        with pytest.raises(LedgerError, match="the state of the noise cannot be read"):
            NoiseMemory(path).read()


def test_a_state_that_cannot_be_written_releases_nothing(tmp_path: Path) -> None:
    memory = NoiseMemory(tmp_path / "absent" / "noise-state.safetensors")
    zero = np.zeros(D, np.int64)
    with pytest.raises(LedgerError, match="nothing was released"):
        banded().execute(zero, lambda: zero, 0, memory)
    assert memory.read() == {}


# --- through the door ----------------------------------------------------------------------------------------------------

LAYOUT = Layout(("a",), ((D,),))
SCOPE = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
PLAN = Plan(clip=1.0, noise_std=2.0, place="sum", mechanism=banded())
MU = 0.5 * banded().sensitivity


@dataclass
class Book:
    entries: list[Entry] = field(default_factory=list)

    def charge_all(self, entries: Sequence[Entry]) -> None:
        raise AssertionError("what has a state is charged once a round")

    def charge_once(self, entry: Entry, *, digest: str) -> None:
        self.entries.append(entry)


def door(ledger: Any, memory: NoiseMemory | None, *, seeded: bool = False, **more: Any) -> Door:
    return Door(LAYOUT, SCOPE, "r", ledger, Randomness(1, seeded), memory=memory, **more)


def released(d: Door, t: int, vectors: list[torch.Tensor], plan: Plan = PLAN) -> Any:
    return d.release_sum([d.seal(v, plan, c, t) for c, v in enumerate(vectors)], plan, t, 4.0)


def test_a_run_through_the_door_is_the_mean_plus_decorrelated_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    d = door(Book(), NoiseMemory(), seeded=True)
    k = exponent_for(2.0, PLAN.mechanism.bits)
    noise: list[NDArray[np.float64]] = []
    for t in range(6):
        vectors = list(torch.randn(3, D, generator=generator))
        upload = released(d, t, vectors)
        gridded = sum(to_grid(v, [(slice(0, D), k + DYADIC_BITS)], 1.0) for v in vectors).astype(np.float64)  # type: ignore[union-attr]
        z = d.randomness.integers(2.0 * 2.0**-k, D, t, -1).astype(np.float64)
        noise.append(z - sum(c * noise[t - j] for j, c in enumerate(COEFFICIENTS) if 0 < j <= t))
        expected = (gridded * 2.0 ** (k + DYADIC_BITS) + noise[t] * 2.0**k) / 4
        np.testing.assert_allclose(upload.vector.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert isinstance(d.ledger, Book)
    assert [e.event for e in d.ledger.entries] == [Gaussian(MU), *[Gaussian(0.0)] * 5]


LATER = {
    "less noise": {"noise_std": 1e-4},
    "a larger clip": {"clip": 100.0},
    "fewer coordinates": {"support": torch.arange(D) > 1},
    "bounds of layers": {"layer_clip": torch.tensor([0.5])},
    "another matrix": {"mechanism": banded((1.0, 0.25))},
}


@pytest.mark.parametrize("change", LATER)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_plan_that_changes_after_it_was_paid_for_releases_nothing(change: str, resumed: bool, tmp_path: Path) -> None:
    """Later rounds cost nothing, so with a ten thousandth of the noise in round 1 a run had a finite and wrong number."""
    path, other = tmp_path / "noise-state.safetensors", replace(PLAN, **LATER[change])  # type: ignore[arg-type]
    memory, book = NoiseMemory(path), Book()
    released(door(book, memory), 0, [torch.ones(D)])
    with pytest.raises(ConfigError, match="make the same plan in every round"):
        released(door(book, NoiseMemory(path) if resumed else memory), 1, [torch.ones(D)], other)
    assert [entry.round for entry in book.entries] == [0]
    released(door(book, NoiseMemory(path)), 1, [torch.ones(D)], replace(PLAN, broadcast={"news": 1}))


def test_a_state_that_does_not_name_its_plan_releases_nothing(tmp_path: Path) -> None:
    memory = NoiseMemory(tmp_path / "noise-state.safetensors")
    PLAN.mechanism.execute(np.zeros(D, np.int64), lambda: np.zeros(D, np.int64), 0, memory)
    with pytest.raises(ConfigError, match="make the same plan in every round"):
        released(door(Book(), memory), 1, [torch.ones(D)])


def test_single_uploads_cannot_carry_correlated_noise() -> None:
    plan = replace(PLAN, place="upload")
    for act in ("upload", "seal"):
        with pytest.raises(ConfigError, match="give the door a memory"):
            getattr(door(Book(), NoiseMemory()), act)(torch.ones(D), plan, 0, 0)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    Ledger.create(tmp_path / "ledger.sqlite", "r", {}).close()
    return tmp_path / "ledger.sqlite"


def budgeted(ledger: Path, mu: float = MU) -> BudgetedLedger:
    return BudgetedLedger(ledger, Budgets(GdpFilter.from_mu(mu, 1e-5), SCOPE))


def rows(ledger: Path) -> list[int]:
    with Ledger.open(ledger) as held:
        return [entry.round for _, _, entry in held.entries()]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_after_a_crash_a_round_leaves_as_before_and_is_charged_once(at: int, ledger: Path) -> None:
    """Secret noise and other data: the integers of the first time, within the budget of one run."""
    state, first = ledger.with_name("noise-state.safetensors"), torch.zeros(0)
    for t in range(at + 1):
        first = released(door(budgeted(ledger), NoiseMemory(state)), t, [torch.ones(D)]).integers
    again = released(door(budgeted(ledger), NoiseMemory(state)), at, [-torch.ones(D)] * 2).integers
    assert torch.equal(first, again)
    released(door(budgeted(ledger), NoiseMemory(state)), at + 1, [torch.ones(D)])
    assert rows(ledger) == list(range(at + 2))


def test_a_crash_between_state_and_charge(ledger: Path) -> None:
    """The state is written, the ledger is not: nothing had left, and the round is charged when it does."""

    class Unplugged(BudgetedLedger):
        def charge_once(self, entry: Entry, *, digest: str) -> None:
            raise KeyboardInterrupt

    state = ledger.with_name("noise-state.safetensors")
    with pytest.raises(KeyboardInterrupt):
        released(door(Unplugged(ledger, None), NoiseMemory(state)), 0, [torch.ones(D)])
    assert rows(ledger) == []
    kept = NoiseMemory(state).read()["released"].tolist()
    assert released(door(budgeted(ledger), NoiseMemory(state)), 0, [torch.zeros(D)]).integers.tolist() == kept
    assert rows(ledger) == [0]


@pytest.mark.parametrize("at", [0, 2])
def test_a_state_that_was_lost_or_put_back_releases_no_round_twice(at: int, ledger: Path) -> None:
    """With the ledger ahead of the state the round would leave with other noise, for which nothing was planned."""
    state, before = ledger.with_name("noise-state.safetensors"), b""
    for t in range(at + 1):
        before = state.read_bytes() if state.exists() else b""
        released(door(budgeted(ledger), NoiseMemory(state)), t, [torch.ones(D)])
    if before:
        state.write_bytes(before)
    else:
        state.unlink()
    for _ in range(3):  # a refusal must not make the next try pass
        with pytest.raises(LedgerError, match=f"round {at} was released before, and the state of its noise was lost"):
            released(door(budgeted(ledger), NoiseMemory(state)), at, [torch.ones(D)])
    assert rows(ledger) == list(range(at + 1))


def test_independent_noise_is_drawn_and_charged_anew(ledger: Path) -> None:
    plan = replace(PLAN, mechanism=Independent(), noise_std=4.0)
    one, other = (released(door(budgeted(ledger, 0.75), NoiseMemory()), 0, [torch.ones(D)], plan).integers for _ in range(2))
    assert not torch.equal(one, other)
    assert rows(ledger) == [0, 0]
    for _ in range(7):
        released(door(budgeted(ledger, 0.75), NoiseMemory()), 0, [torch.ones(D)], plan)
    with pytest.raises(BudgetExhausted):
        released(door(budgeted(ledger, 0.75), NoiseMemory()), 0, [torch.ones(D)], plan)
