"""Hiding: all inputs of honest clients with one sum have the same transcripts, each for other masks."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from fedveil.secure_aggregation.encoding import read_masked
from fedveil.secure_aggregation.masks import needed_bits, signed, unpacked
from masked_clients import D, N, Played, terms_of

HONEST = (0, 1, 3)
CORRUPT = (2, 4)


def transcript() -> tuple[Played, dict[int, np.ndarray], dict[int, np.ndarray]]:
    """What honest clients sent, without the masks that the corrupt clients know, and what they put in."""
    play = Played()
    server = play.begun()
    request = server.name_set()
    assert request is not None
    sent = {i: read_masked(play.members[i].masked(request))[0] for i in range(N)}
    words = {i: unpacked(vector, D, play.terms.bits) for i, vector in sent.items()}
    inputs = {i: play.releases[i].drawn[-1].astype(np.uint32) for i in range(N)}
    return play, words, inputs


@pytest.mark.parametrize("seed", range(5))
def test_masks_exist_for_any_inputs_of_the_same_honest_sum(seed: int) -> None:
    """Pairwise masks of the honest clients that give the same bytes: along the path 0, 1, 3 they are determined one by one."""
    _, sent, inputs = transcript()
    hidden = {i: sent[i] - inputs[i] for i in HONEST}  # all masks of a client; those with corrupt ones are known
    others = np.random.default_rng(seed).integers(0, 2**32, (len(HONEST), D), dtype=np.uint32)
    others[-1] = sum(inputs[i] for i in HONEST) - others[0] - others[1]
    wanted = dict(zip(HONEST, others, strict=True))
    moved = {pair: np.zeros(D, np.uint32) for pair in combinations(HONEST, 2)}
    moved[0, 1] = inputs[0] - wanted[0]
    moved[1, 3] = inputs[1] - wanted[1] + moved[0, 1]
    for i in HONEST:
        masks = hidden[i].copy()
        for (low, high), by in moved.items():
            masks += by if i == low else -by if i == high else np.zeros(D, np.uint32)
        assert (wanted[i] + masks).tobytes() == sent[i].tobytes()


def test_the_honest_sum_and_nothing_else_follows_from_a_transcript() -> None:
    play, sent, inputs = transcript()
    total = signed(sum(sent[i] for i in range(N)), play.terms.bits)
    assert (total == play.plain_sum(range(N))).all()
    for size in range(1, N):
        for some in combinations(range(N), size):
            part = sum(sent[i] for i in some) - sum(inputs[i] for i in some)
            assert np.count_nonzero(part) == D, f"the sum of {some} alone can be read"


def test_masked_vectors_are_uniform() -> None:
    """Every byte of 2^16 coordinates of a client that sends zeros, by a chi-square test at 5 standard deviations."""
    play = Played(terms_of(count=2**16))
    for release in play.releases.values():
        release.vector = np.zeros(2**16, np.int64)
    vector, _ = read_masked(play.members[0].masked(play.request()))
    for k in range(4):
        counts = np.bincount(np.frombuffer(vector, np.uint8)[k::4], minlength=256)
        chi = ((counts - 256.0) ** 2 / 256.0).sum()
        assert abs(chi - 255) < 5 * np.sqrt(2 * 255)


@pytest.mark.parametrize(
    ("most", "std", "clients", "bits"), [(2.0**15, 2.0**16, 3, 24), (2.0**20, 2.0**17, 10, 32), (1, 4, 3, 8)]
)
def test_the_bits_of_a_coordinate_hold_the_largest_sum(most: float, std: float, clients: int, bits: int) -> None:
    draws = 61_706 * 105.0
    found = needed_bits(most, std, clients, draws)
    assert found == bits
    deviations = np.sqrt(2 * (np.log(2 * draws) + 64 * np.log(2)))
    assert 2.0 ** (found - 1) > clients * most + deviations * std * np.sqrt(clients) + clients
    assert found == 8 or 2.0 ** (found - 9) <= clients * most + deviations * std * np.sqrt(clients) + clients
