"""Selection under attack: the best of a secret number of runs stays within its price, and what leaks does not.

Each run answers one bit by randomised response: 0.5-DP alone. The exact worst case of the selection is known by hand.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from fedveil.accounting.selection import draw, selection_rdp, tries_of_mean
from fedveil.accounting.types import Adjacency, Audit, Guarantee, Scope, Unit, View
from fedveil.audit.two_world import Repeats, many_runs
from fedveil.statement.statement import exceeds

SCOPE = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.FINAL)
ONE = 0.5
LAW = tries_of_mean(1.0, 15.0)
PRICE = float(selection_rdp(LAW, np.array([1e9]), np.array([ONE]))[0])
"""Of pure privacy, at an order so large that it is the largest loss."""
Runs = np.ndarray


def audited(released: Callable[[int, Runs], float], law_draw: Callable[[random.Random], int], n: int = 4000) -> Audit:
    """A lower bound on the epsilon of what is released of the runs (true where a run's answer is good) of one search."""
    bits = random.Random(7)

    def search(world: int, rng: np.random.Generator) -> float:
        bad = 1 / (1 + math.exp(-ONE)) if world else 1 / (1 + math.exp(ONE))
        return released(world, rng.random(law_draw(bits)) >= bad)

    return many_runs(search, SCOPE, np.random.default_rng(3), Repeats(n, 800, 0.0))


def secret(bits: random.Random) -> int:
    return draw(LAW, bits.getrandbits)


def test_the_best_of_a_secret_number_tells_more_than_one_run_and_less_than_its_price() -> None:
    found = audited(lambda _, good: float(not good.any()), secret)
    assert pytest.approx(3 * ONE, rel=1e-6) == PRICE
    assert ONE < found.epsilon < PRICE
    assert exceeds(found, Guarantee(ONE, 0.0, SCOPE, "of one run"))
    assert not exceeds(found, Guarantee(PRICE, 0.0, SCOPE, "rdp"))


def test_one_run_alone_does_not_exceed_its_own_price() -> None:
    assert audited(lambda _, good: float(not good[0]), secret).epsilon <= ONE


@pytest.mark.parametrize(
    "released",
    [
        lambda world, good: float(not good.all() if world else not good.any()),  # chosen by a private score that nobody charged
        lambda _, good: float((~good).sum() - good.sum()),  # the losers are released, too
    ],
    ids=["uncharged-score", "losers"],
)
def test_a_selection_that_leaks_is_refuted(released: Callable[[int, Runs], float]) -> None:
    assert exceeds(audited(released, secret), Guarantee(PRICE, 0.0, SCOPE, "rdp"))


def test_a_number_of_runs_that_is_known_is_refuted() -> None:
    assert exceeds(audited(lambda _, good: float(not good.any()), lambda _: 8, 20_000), Guarantee(PRICE, 0.0, SCOPE, "rdp"))
