from __future__ import annotations

import math

import numpy as np
import pytest

from fedveil.accounting.types import at_least
from fedveil.audit import worlds
from fedveil.audit.single_upload import features, structural
from fedveil.audit.subject import AuditedMechanism, Output, on_pair
from fedveil.errors import ConfigError

D = 30


def noisy(x: np.ndarray, rng: np.random.Generator) -> Output:
    return Output(x + rng.standard_normal(x.size))


def randomly_masked(x: np.ndarray, rng: np.random.Generator) -> Output:
    keep = rng.random(x.size) < 0.5
    return Output(np.where(keep, x + rng.standard_normal(x.size), 0.0), keep)


def quantised(x: np.ndarray, rng: np.random.Generator) -> Output:
    return Output(np.round(x + 0.4 * rng.standard_normal(x.size)))


PAIR = np.zeros(D), np.full(D, 0.05)
CLEAN: dict[str, AuditedMechanism] = {
    "gaussian": on_pair(noisy, *PAIR),
    "random mask": on_pair(randomly_masked, *PAIR),
    "quantised": on_pair(quantised, *PAIR),
    "same constant": on_pair(lambda x, rng: Output(np.concatenate([x + rng.standard_normal(D), np.ones(3)])), *PAIR),
}


@pytest.mark.parametrize("name", CLEAN)
def test_no_false_leak_in_many_repeats(name: str) -> None:
    found = [structural(CLEAN[name], np.random.default_rng(seed), confirm=5) for seed in range(100)]
    assert not any(result.leak for result in found)


def test_more_releases_are_drawn_only_while_something_looks_like_a_leak() -> None:
    """Constant 'not sent' in one world where the other was seen sent only: frequent in 8 releases, impossible in many."""
    assert structural(CLEAN["gaussian"], np.random.default_rng(0)).releases == 8
    found = [structural(_either(world), np.random.default_rng(world)) for world in range(20)]
    assert max(result.releases for result in found) > 30
    assert not any(result.leak for result in found)


def _either(seed: int) -> AuditedMechanism:
    rare = np.random.default_rng(seed).random(D) < 0.5

    def mechanism(world: int, rng: np.random.Generator, /) -> Output:
        return Output(rng.standard_normal(D), rng.random(D) < np.where(rare ^ bool(world), 0.05, 0.9))

    return mechanism


def test_constant_coordinates_are_counted() -> None:
    result = structural(CLEAN["same constant"], np.random.default_rng(0))
    assert (result.leak, result.deterministic) == (False, 3)


def _extra(world: int, rng: np.random.Generator, /) -> Output:
    return Output(rng.standard_normal(D), extras={"loss": 0.5 + 0.1 * world})


def _dtype(world: int, rng: np.random.Generator, /) -> Output:
    return Output(rng.standard_normal(D).astype(np.float32 if world else np.float64))


def _shape(world: int, rng: np.random.Generator, /) -> Output:
    return Output(rng.standard_normal(D + world))


def _pattern(world: int, rng: np.random.Generator, /) -> Output:
    return Output(rng.standard_normal(D), np.arange(D) < 10 + world)


def _count_only(world: int, rng: np.random.Generator, /) -> Output:
    vector = rng.standard_normal(D)
    vector[rng.permutation(D)[: 5 + world]] = 0
    return Output(vector)


def _norm(world: int, rng: np.random.Generator, /) -> Output:
    vector = rng.standard_normal(D)
    return Output(((1.0 + 0.01 * world) * vector / np.linalg.norm(vector)).astype(np.float32))


def _one_point_mass(world: int, rng: np.random.Generator, /) -> Output:
    vector = rng.standard_normal(D)
    if world:
        vector[3] = 0.0
    return Output(vector)


@pytest.mark.parametrize("mechanism", [_extra, _dtype, _shape, _pattern, _count_only, _norm, _one_point_mass])
def test_each_side_channel_is_found_and_confirmed(mechanism: AuditedMechanism) -> None:
    result = structural(mechanism, np.random.default_rng(0), confirm=100)
    assert result.leak
    assert result.confirmed is not None
    assert result.floor == pytest.approx(3.28, abs=0.01)  # the ceiling of 100 + 100 releases
    assert str(result).endswith(f"by the counts alone epsilon >= {at_least(result.floor)}")


def test_rarely_noisy_coordinate_is_not_called_constant() -> None:
    def mechanism(world: int, rng: np.random.Generator, /) -> Output:
        vector = rng.standard_normal(D)
        vector[0] = float(rng.random() < 0.02) if world else 0.0
        return Output(vector)

    result = structural(mechanism, np.random.default_rng(3), confirm=1000)
    assert not result.leak


@pytest.mark.parametrize(
    ("subject", "deterministic"),
    [
        (worlds.ladp_below_threshold(), 100),
        (worlds.fedanc(), 899),
        (worlds.fedanc(masked=True), 899),
        (worlds.private_mask(), 49),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_published_faults_are_structural(subject: worlds.Subject, deterministic: int) -> None:
    result = structural(subject.mechanism, np.random.default_rng(1))
    assert result.leak
    assert result.deterministic == deterministic
    assert result.floor == pytest.approx(5.60, abs=0.01)


@pytest.mark.parametrize(
    "subject", [worlds.plain_gaussian(), worlds.noisy_mask(), worlds.truncated_noise()], ids=lambda s: s.name
)
def test_no_structural_leak_where_noise_is_everywhere_or_the_mask_was_released(subject: worlds.Subject) -> None:
    assert not structural(subject.mechanism, np.random.default_rng(1)).leak


def test_features_keep_bits_apart() -> None:
    a, b = (features(Output(np.array([value, math.nan]))) for value in (0.0, -0.0))
    assert a[0] != b[0]
    assert a[1] == b[1]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="releases"):
        structural(CLEAN["gaussian"], np.random.default_rng(0), releases=1)
