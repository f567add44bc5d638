"""The audit of a single upload: structural first, then two statistical tests and a recomputation of the noise, on fresh releases.

The scores use the KNOWN means and noise of the mechanism (the auditor owns both inputs): a variance estimated from a few pilot
uploads has no power in 1000 dimensions. Thresholds come from pilot releases that are not tested.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting.formatting import at_least
from fedveil.accounting.types import Audit
from fedveil.audit.intervals import check_level, epsilon_ceiling
from fedveil.audit.recompute import audit_noise
from fedveil.audit.sampled_curve import audit_sampled, choose_cut
from fedveil.audit.structural import FALSE_CONSTANT, Structural, structural
from fedveil.audit.subject import Subject
from fedveil.audit.two_world import audit_dp, audit_gdp, choose_threshold, midpoint, rates
from fedveil.errors import ConfigError

Floats = NDArray[np.float64]
_FLOOR = 1e-9  # std given to a noiseless coordinate, relative to the largest std
_ENTRIES = 4_000_000  # numbers held at once


@dataclass(frozen=True)
class SingleUpload:
    """All findings about one upload.

    structure: what the structural audit saw. headline: the bound to report, chosen by the kind of mechanism beforehand and not by
    its value. tests: every test that was run, each at its own confidence.
    """

    structure: Structural
    headline: Audit
    tests: tuple[Audit, ...]


def log_likelihood_ratio(subject: Subject, uploads: Floats) -> Floats:
    """log density in world 1 minus log density in world 0 of each upload, for independent Gaussian noise of the known std.

    Args:
        subject: known means and stds.
        uploads: [n, d].

    Coordinates without noise get a tiny std, so that they decide the score. A subject whose noise is not Gaussian is still tested
    soundly: any score is allowed, only its power suffers. Where the unit is in the release by chance, the ratio of the mixtures
    rises with this one for opposite means, and for none against one, so that thresholds on either are the same tests.
    """
    top = max(float(np.max(std)) for std in subject.noise_std)
    floor = _FLOOR * top if top > 0 else _FLOOR
    std_0, std_1 = (np.maximum(std, floor) for std in subject.noise_std)
    if np.array_equal(std_0, std_1):
        weight = (subject.mean[1] - subject.mean[0]) / std_0**2
        return np.asarray((uploads - (subject.mean[0] + subject.mean[1]) / 2) @ weight)
    z_0, z_1 = (uploads - subject.mean[0]) / std_0, (uploads - subject.mean[1]) / std_1
    return np.asarray(0.5 * (np.sum(z_0**2, axis=1) - np.sum(z_1**2, axis=1)) + np.sum(np.log(std_0 / std_1)))


def largest_deviation(subject: Subject, uploads: Floats) -> Floats:
    """max over coordinates of |upload - mean of world 0|: shows noise of bounded support, which a neighbour's upload can leave.

    Args:
        subject: known means.
        uploads: [n, d].
    """
    return np.asarray(np.max(np.abs(uploads - subject.mean[0]), axis=1))


def releases(subject: Subject, world: int, n: int, rng: np.random.Generator) -> Floats:
    """The vectors of n fresh uploads of one world, [n, d] in float64."""
    out = np.empty((n, subject.d))
    for row in out:
        vector = subject.mechanism(world, rng).vector
        if vector.size != subject.d:
            raise ConfigError(f"{subject.name}: an upload has {vector.size} coordinates, the subject {subject.d}")
        row[:] = vector.reshape(-1)
    return out


def _rows(subject: Subject) -> int:
    """How many uploads to hold at once."""
    return max(1, _ENTRIES // subject.d)


def _scores(subject: Subject, world: int, n: int, rng: np.random.Generator) -> Floats:
    """[2, n]: log-likelihood ratio and largest deviation of n fresh uploads, a block at a time."""
    blocks = []
    for start in range(0, n, _rows(subject)):
        uploads = releases(subject, world, min(_rows(subject), n - start), rng)
        blocks.append([log_likelihood_ratio(subject, uploads), largest_deviation(subject, uploads)])
    return np.concatenate(blocks, axis=1)


def single_upload(
    subject: Subject,
    rng: np.random.Generator,
    *,
    n: int = 1000,
    pilot: int = 500,
    delta: float = 1e-5,
    alpha: float = 0.05,
) -> SingleUpload:
    """Audit one upload of a mechanism between two neighbouring inputs.

    Args:
        subject: the mechanism, its scope and what is known about it.
        rng: source of all randomness.
        n: tested releases per world, and releases that confirm a structural leak.
        pilot: separate releases per world that choose the thresholds.
        delta: in (0, 1).
        alpha: error probability of each test.

    The headline is inf for a confirmed structural leak; else the Gaussian DP test if the subject's curve is Gaussian, or
    that of a sampled Gaussian; else the largest-deviation (bounded) or the likelihood-ratio test with Clopper-Pearson.
    """
    check_level(alpha)
    if n < 1 or pilot < 1:
        raise ConfigError(f"n and pilot must be >= 1, got {n} and {pilot}")
    structure = structural(subject.present or subject.mechanism, rng, confirm=n)
    pilots = [_scores(subject, world, pilot, rng) for world in (0, 1)]
    fresh = [_scores(subject, world, n, rng) for world in (0, 1)]

    scope = subject.scope
    ceiling = f"ceiling {epsilon_ceiling(n, alpha, delta):.2f}"
    tests = []
    for row, test in enumerate(("likelihood ratio", "largest deviation")[: 1 + subject.bounded]):
        threshold = choose_threshold(pilots[0][row], pilots[1][row], n, delta, alpha)
        counts = rates(fresh[0][row], fresh[1][row], threshold)
        tests.append(audit_dp(counts, delta, scope, alpha, note=ceiling, test=f"one upload, {test}"))
    if subject.gaussian:
        counts = rates(fresh[0][0], fresh[1][0], midpoint(pilots[0][0], pilots[1][0]))
        tests.append(audit_gdp(counts, delta, scope, alpha, test="one upload, likelihood ratio"))
    if subject.sampled is not None:
        cut = choose_cut([pilots[0][0], pilots[1][0]], subject.sampled, n, delta, scope.adjacency, alpha)
        counts = rates(fresh[0][0], fresh[1][0], cut)
        tests.append(audit_sampled(counts, subject.sampled, delta, scope, alpha, test="one upload, likelihood ratio"))
    headline = tests[-1]
    if subject.gaussian:
        tests.append(audit_noise(subject, releases(subject, 0, min(n, _rows(subject)), rng), delta, alpha))
    if structure.leak and delta < subject.rate:
        assert structure.confirmed is not None
        note = f"{structure}; confirmed in {n} + {n} releases, which alone show {at_least(structure.floor, 3)} at 95 % confidence"
        headline = Audit(float("inf"), delta, scope, "one upload, structural", 1 - FALSE_CONSTANT, 2 * n, note=note)
    return SingleUpload(structure, headline, tuple(tests))
