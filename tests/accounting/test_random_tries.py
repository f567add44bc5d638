"""Draws of the number of tries: by inversion, with the frequencies of the law."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy.stats import chisquare

from fedveil.accounting.selection import RandomTries, draw, tries_of_mean


@pytest.mark.parametrize("eta", [-0.5, 0.0, 1.0, 3.0])
def test_a_draw_inverts_the_distribution_function(eta: float) -> None:
    law = tries_of_mean(eta, 10)

    def at(share: float) -> int:
        return draw(law, lambda n: int(share * 2**n))

    for tries in (2, 7, 30):
        edge = 1 - law.tail(tries - 1)
        assert (at(edge - 1e-9), at(edge + 1e-9)) == (tries - 1, tries)
    assert at(0.0) == 1


@pytest.mark.parametrize("law", [tries_of_mean(0, 3), tries_of_mean(1, 5), tries_of_mean(-0.5, 4), RandomTries(2.0, 0.3)])
def test_frequencies(law: RandomTries) -> None:
    bits, n, cells = random.Random(5).getrandbits, 4000, 8
    drawn = np.minimum([draw(law, bits) for _ in range(n)], cells + 1)
    expected = np.array([*(law.probability_of(k) for k in range(1, cells + 1)), law.tail(cells)])
    found = np.bincount(drawn, minlength=cells + 2)[1:]
    assert chisquare(found, n * expected / expected.sum()).pvalue > 1e-3
    assert chisquare(found, n * np.roll(expected, 1) / expected.sum()).pvalue < 1e-9


def test_by_default_numbers_are_secret() -> None:
    law = tries_of_mean(0, 50)
    assert len({draw(law) for _ in range(60)}) > 5
