"""The float attack is loud on noise added in float32 and silent on the grid; so are the low bits of the integers themselves."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from fedveil.audit.low_bits import PatternAudit, audit_float_pattern, audit_integer_bits, impossible, judge
from fedveil.audit.subject import epsilon_ceiling
from fedveil.errors import ConfigError
from fedveil.gradients.gradient_blocks import Dense, clipped_sum
from fedveil.mechanism.grid import Group, exponent_for, from_grid, to_grid
from fedveil.mechanism.plan import DpSgd
from fedveil.mechanism.sampler import rounded_normal
from fedveil.models.model_registry import build
from fedveil.release.dpsgd import PerExampleGradient
from fedveil.release.noise import Randomness
from fedveil.training.local import Local, LocalSpec
from fedveil.training.params import FlatModel

D = 61_706  # LeNet-5
UPLOADS = 10
CLIENTS = 100
# (noise multiplier, clip); the std of the first and of the last two is a power of two
SETTINGS = [
    *[(1.0, 1.0), (15.0, 1.0)],
    *(
        pytest.param(*s, marks=pytest.mark.slow)
        for s in [(1.0, 0.7), (1.0001, 1.0), (1.86, 1.0), (100.0, 1.0), (15.0, 16 / 15), (100.0, 1.28)]
    ),
]

LENET5 = FlatModel(build("lenet5", (1, 28, 28), 10, 0))

Vector = NDArray[np.float32]
Integers = NDArray[np.int64]
Worlds = tuple[Vector, Vector]


def clipped_vector(rng: np.random.Generator, clip: float) -> Vector:
    x = rng.standard_normal(D).astype(np.float32)
    return x * np.float32(clip / np.linalg.norm(x.astype(np.float64)) * (1 - 1e-6))


@pytest.fixture(params=["server", "aggregate"])
def worlds(request: pytest.FixtureRequest) -> Callable[[float], Worlds]:
    """What the noise is added to, without and with one client: nothing or its vector; all others or everyone."""

    def make(clip: float) -> Worlds:
        rng = np.random.default_rng(0)
        x = clipped_vector(rng, clip)
        others = np.zeros(D, dtype=np.float32)
        if request.param == "aggregate":
            for _ in range(CLIENTS - 1):
                others += clipped_vector(rng, clip)
        return others, others + x

    return make


def noised_in_float32(rng: np.random.Generator, vector: Vector, std: float) -> Vector:
    """The release that fedveil had once: a scaled sum of two Box-Muller draws in float64, then float32 all the way."""
    total = np.zeros(D)
    for _ in range(2):
        u, v = rng.random((2, D // 2)) + 2.0**-54
        radius, angle = np.sqrt(-2 * np.log(u)), 2 * np.pi * v
        total += np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return vector + (total / np.sqrt(2)).astype(np.float32) * np.float32(std)


def grid_of(std: float) -> list[Group]:
    return [(slice(0, D), exponent_for(std))]


def noised_on_grid(rng: np.random.Generator, vector: Vector, std: float) -> Integers:
    groups = grid_of(std)
    return to_grid(torch.from_numpy(vector), groups, math.inf) + rounded_normal(std * 2.0 ** -groups[0][1], D, rng.bytes(32))


def attack(worlds: Worlds, std: float, release: Callable[[np.random.Generator, Vector, float], Vector]) -> PatternAudit:
    rng = np.random.default_rng(1)
    absent, present = ([release(rng, vector, std) for _ in range(UPLOADS)] for vector in worlds)
    return audit_float_pattern(absent, present, std, worlds)


@pytest.mark.parametrize(("z", "clip"), SETTINGS)
def test_loud_on_float32_noise(z: float, clip: float, worlds: Callable[[float], Worlds]) -> None:
    found = attack(worlds(clip), z * clip, noised_in_float32)
    assert found.absent.max() < 0 <= found.present.min()
    assert found.p_value < 1e-3
    assert found.epsilon == pytest.approx(epsilon_ceiling(UPLOADS))


@pytest.mark.parametrize(("z", "clip"), SETTINGS)
def test_silent_on_the_grid(z: float, clip: float, worlds: Callable[[float], Worlds]) -> None:
    def release(rng: np.random.Generator, vector: Vector, std: float) -> Vector:
        return from_grid(noised_on_grid(rng, vector, std), grid_of(std))

    found = attack(worlds(clip), z * clip, release)
    assert found.p_value > 1e-3
    assert found.epsilon == 0


@pytest.mark.parametrize(("z", "clip"), SETTINGS)
def test_low_bits_of_the_integers_are_silent(z: float, clip: float, worlds: Callable[[float], Worlds]) -> None:
    rng = np.random.default_rng(2)
    std = z * clip
    without, with_it = worlds(clip)
    absent, present = ([noised_on_grid(rng, vector, std) for _ in range(UPLOADS)] for vector in (without, with_it))
    contribution = np.subtract(*(to_grid(torch.from_numpy(v), grid_of(std), math.inf) for v in (with_it, without)))
    found = audit_integer_bits(absent, present, contribution)
    assert found.p_value > 1e-3
    assert found.epsilon == 0


@pytest.mark.parametrize("z", [1.0, 1.86, 100.0])
def test_low_bits_of_float32_noise_on_the_grid_are_loud(z: float) -> None:
    """Noise cast to integers from float32 has zeros where the noise is large, which bares the low bits of what it is added to."""
    rng = np.random.default_rng(3)
    contribution = to_grid(torch.from_numpy(clipped_vector(rng, 1.0)), grid_of(z), 1.0)

    def release(m: Integers) -> Integers:
        return m + np.rint(rng.standard_normal(D).astype(np.float32) * np.float32(z * 2.0 ** -grid_of(z)[0][1])).astype(np.int64)

    absent, present = ([release(m) for _ in range(2 * UPLOADS)] for m in (0 * contribution, contribution))
    found = audit_integer_bits(absent, present, contribution)
    assert found.p_value < 1e-20
    assert found.epsilon == pytest.approx(epsilon_ceiling(UPLOADS))


def test_impossible_by_hand() -> None:
    """With std 1.5, the floats z in [1, 4/3) reach two of three floats in [1.5, 2); the others are impossible."""
    z = np.float32(1.25) + np.arange(1000, dtype=np.float32) * np.float32(2.0**-23)
    floats = z * np.float32(1.5)
    assert impossible(floats, 1.5) == 0
    between = np.arange(floats[0], floats[-1], 2.0**-23).astype(np.float32)
    assert impossible(between, 1.5) == len(np.setdiff1d(between, floats)) > 450
    assert impossible(floats + np.float32(1.0), 1.5, known=np.ones_like(floats)) == 0


@pytest.mark.parametrize("std", [1.0, 0.7, 1.86, 15.0])
def test_the_true_hypothesis_is_never_impossible(std: float) -> None:
    rng = np.random.default_rng(5)
    for scale in (0.0, 1e-4, 1.0, 1e4):
        known = (scale * rng.standard_normal(D)).astype(np.float32)
        assert impossible(noised_in_float32(rng, known, std), std, known) == 0


def coarse_bits(released: NDArray[np.float32], smallest: int = 64) -> float:
    """p-value of the low mantissa bits of the coordinates nearest to zero, for an adversary who knows no contribution.

    Noise alone has random low bits. Where noise and data nearly cancel, the low bits of their sum are zero. This tells even where
    the std is a power of two, which makes every float32 possible. Integers on a grid have zeros there too, in both worlds.

    Args:
        released: [n], as it left. smallest: how many coordinates to look at.
    """
    nearest = np.sort(np.abs(released[released != 0].astype(np.float32)))[:smallest]
    mantissas = (nearest.view(np.uint32) & np.uint32(2**23 - 1)) | np.uint32(2**23)
    zeros = np.log2((mantissas & (~mantissas + np.uint32(1))).astype(np.float64)).sum()
    return float(stats.nbinom.sf(zeros - 1, len(nearest), 0.5)) if len(nearest) else 1.0


def test_coarse_bits() -> None:
    """Low bits for an adversary who knows nothing of the data, at a std that is a power of two."""
    rng = np.random.default_rng(6)
    x = clipped_vector(rng, 1.0)
    noise = [coarse_bits(noised_in_float32(rng, 0 * x, 1.0)) for _ in range(UPLOADS)]
    data = [coarse_bits(noised_in_float32(rng, x, 1.0)) for _ in range(UPLOADS)]
    assert min(noise) > 1e-3
    assert max(data) < 1e-6
    assert coarse_bits(np.zeros(5, dtype=np.float32)) == 1.0


def test_verdict() -> None:
    same = np.zeros(10)
    assert judge(same, same).p_value == 1.0
    assert judge(same, same).epsilon == 0.0
    assert judge(same - 1, same).epsilon == pytest.approx(epsilon_ceiling(10))


def test_refused_arguments() -> None:
    y = [np.zeros(3, dtype=np.int64)] * 2
    with pytest.raises(ConfigError, match="bits"):
        audit_integer_bits(y, y, y[0], bits=0)
    with pytest.raises(ConfigError, match="halves"):
        audit_integer_bits(y[:1], y, y[0])


# --- a step of DP-SGD ----------------------------------------------------------------------------------------------------


def step_worlds(clip: float, others: int) -> tuple[list[torch.Tensor], Worlds]:
    """The batches without and with one example, and the sums of their clipped gradients; gradients are the examples' own."""
    rng = np.random.default_rng(0)
    examples = torch.from_numpy(np.stack([10 * clipped_vector(rng, clip) for _ in range(others + 1)]))
    batches = [examples[:others], examples]
    sums = [clipped_sum([Dense(batch)], clip).to(torch.float32).numpy() for batch in batches]
    return batches, (sums[0], sums[1])


def step_in_float32(rng: np.random.Generator, vector: Vector, std: float, expected: float) -> Vector:
    """The step that fedveil had once: sum, noise and division in float32."""
    return noised_in_float32(rng, vector, std) / np.float32(expected)


def step_released(batch: torch.Tensor, z: float, clip: float, expected: float) -> Vector:
    """One step of the real source, with secret noise."""
    model = LENET5
    plan = DpSgd(clip, z, 1.0, 1, expected, 1000)
    source = PerExampleGradient(plan, Randomness(0), (0, 0), lambda _, x, y: ([Dense(x)], x.new_zeros(len(x))))
    local = Local(model, model.vector.clone(), LocalSpec(), source, torch.Generator())
    for x, y in source.batches(local, batch, torch.zeros(len(batch), dtype=torch.int64)):
        source(local, x, y)
    return model.grad.numpy().copy()


@pytest.mark.parametrize(("others", "expected"), [(0, 1.0), (9, 21.3)])
@pytest.mark.parametrize(("z", "clip"), SETTINGS)
@pytest.mark.heavy
def test_loud_on_a_step_in_float32(z: float, clip: float, expected: float, others: int) -> None:
    _, known = step_worlds(clip, others)
    rng = np.random.default_rng(1)
    absent, present = ([step_in_float32(rng, v, z * clip, expected) for _ in range(UPLOADS)] for v in known)
    found = audit_float_pattern(absent, present, z * clip, known, divisor=expected)
    assert found.absent.max() < 0 <= found.present.min()
    assert found.epsilon == pytest.approx(epsilon_ceiling(UPLOADS))


@pytest.mark.parametrize(("others", "expected"), [(0, 1.0), (9, 21.3)])
@pytest.mark.parametrize(("z", "clip"), SETTINGS)
@pytest.mark.heavy
def test_silent_on_a_step_on_the_grid(z: float, clip: float, expected: float, others: int) -> None:
    batches, known = step_worlds(clip, others)
    absent, present = ([step_released(batch, z, clip, expected) for _ in range(UPLOADS)] for batch in batches)
    found = audit_float_pattern(absent, present, z * clip, known, divisor=expected)
    assert found.p_value > 1e-4
    assert found.epsilon == 0
    zeros = judge(*(np.array([coarse_bits(y) for y in world]) for world in (absent, present)))
    assert zeros.p_value > 1e-4  # as many in both worlds
