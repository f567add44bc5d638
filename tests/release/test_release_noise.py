"""Normals for noise that promises nothing, and keys: the right law, each key another draw, secret ones always another."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.release.noise import Randomness


@pytest.mark.parametrize("seeded", [True, False])
def test_normals(seeded: bool) -> None:
    n = 120_000
    x = Randomness(0, seeded).normal(n, 0, 0)
    assert x.shape == (n,)
    assert x.dtype == torch.float32
    assert stats.kstest(x.numpy(), "norm").pvalue > 1e-6
    assert float(x.double().std()) == pytest.approx(1.0, abs=6 / (2 * n) ** 0.5)
    thirds = x.view(3, -1).double()
    assert float((torch.corrcoef(thirds) - torch.eye(3)).abs().max()) < 6 / (n / 3) ** 0.5
    assert torch.equal(x, Randomness(0, seeded).normal(n, 0, 0)) == seeded
    assert not torch.equal(x, Randomness(0, seeded).normal(n, 0, 1))


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_few_normals(n: int) -> None:
    assert Randomness(0).normal(n, 0, 0).shape == (n,)


def test_who_is_sampled_follows_from_the_seed_only_where_noise_does() -> None:
    """Amplification needs the sample to be secret: everybody may know the seed."""
    for way in (lambda r, t: r.coins(0.5, 99, "clients", t), lambda r, t: r.subset(50, 99, "clients", t)):
        assert len({tuple(way(Randomness(3), 0)) for _ in range(20)}) == 20
        assert len({tuple(way(Randomness(3, True), 0)) for _ in range(20)}) == 1
        assert tuple(way(Randomness(3, True), 0)) != tuple(way(Randomness(3, True), 1))


def test_keys() -> None:
    """Seeded keys depend on seed and name alone, and share nothing with what need not be secret; others are fresh each time."""
    seeded = Randomness(3, True)
    names = [(0, 0), (0, 1), (1, 0), ("step", 0, 0), (0, 0, 0)]
    keys = {seeded.key(*name) for name in names} | {Randomness(4, True).key(0, 0)}
    assert len(keys) == len(names) + 1
    assert {len(key) for key in keys} == {32}
    assert seeded.key(0, 0) == Randomness(3, True).key(0, 0)
    secret = Randomness(3)
    assert len({secret.key(0, 0) for _ in range(100)}) == 100


def test_what_layers_draw_is_uniform_and_follows_from_the_whole_key() -> None:
    randomness, drawn = Randomness(3, seeded_noise=True), []
    for step in range(2):
        with randomness.layers(torch.device("cpu"), 0, step):
            drawn.append(torch.rand(20_000).numpy())
            words = torch.get_rng_state().numpy().view(np.uint64)[3 : 3 + 624]
            assert len(set(words.tolist())) > 620
            assert torch.randn(20_000).std() == pytest.approx(1, abs=0.03)
    assert all(stats.kstest(one, "uniform").pvalue > 1e-4 for one in drawn)
    assert abs(np.corrcoef(*drawn)[0, 1]) < 0.04


def test_what_a_forward_pass_draws_follows_from_the_seed_and_leaves_no_trace() -> None:
    def drawn(seed: int, *key: object) -> list[float]:
        with Randomness(seed).forward(torch.device("cpu"), *key):
            return torch.rand(4).tolist()

    before = torch.get_rng_state()
    first = drawn(3, "public", 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert drawn(3, "public", 0) == first
    assert len({tuple(x) for x in (first, drawn(3, "public", 1), drawn(4, "public", 0))}) == 3


def test_one_forward_pass_within_another_leaves_no_trace_either() -> None:
    def numbers() -> list[float]:  # numpy makes two normals at a time, and holds one back
        return [np.random.normal(), random.random(), float(torch.rand(()))]  # noqa: NPY002

    def drawn(within: bool) -> list[float]:
        with Randomness(0).forward(torch.device("cpu"), "outer"):
            first = numbers()
            if within:
                with Randomness(0).forward(torch.device("cpu"), "inner"):
                    assert numbers() != first
            return [*first, *numbers(), *numbers()]

    assert drawn(within=True) == drawn(within=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_a_forward_pass_draws_on_a_gpu_follows_from_the_seed_and_leaves_no_trace() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)

    def drawn() -> list[float]:
        with Randomness(3).forward(device, 0):
            return torch.rand(4, device=device).tolist()

    before = torch.cuda.get_rng_state(device)
    first = drawn()
    assert torch.equal(torch.cuda.get_rng_state(device), before)
    torch.rand(1, device=device)
    assert drawn() == first
