"""Worst-case neighbours for each family of mechanisms: simplified releases whose faults an audit must detect.

Each function returns a `Subject`: one upload of a client with d coordinates, the mechanism's arithmetic as published, and the
pair of inputs that reveals its weakness. `plain_gaussian` is the correct one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, ndtr, ndtri

from fedveil.accounting import gaussian
from fedveil.accounting.types import Adjacency, Scope, Unit, View
from fedveil.audit.subject import Floats, Output, Subject, isotropic
from fedveil.errors import ConfigError

CLIENT_UPLOAD = Scope(Unit.CLIENT, Adjacency.REPLACE_ONE, View.SERVER)


def _pair(d: int, norm: float) -> tuple[Floats, Floats]:
    """Return two opposite updates of the given norm: the largest replace-one difference after clipping."""
    direction = np.full(d, norm / math.sqrt(d))
    return -direction, direction


def _noised(mean: tuple[Floats, Floats], std: tuple[Floats, Floats]) -> Callable[[int, np.random.Generator], Output]:
    """Return a mechanism that releases mean + std x normal, per world."""

    def mechanism(world: int, rng: np.random.Generator, /) -> Output:
        return Output(mean[world] + std[world] * rng.standard_normal(mean[world].size))

    return mechanism


def plain_gaussian(
    d: int = 1000, epsilon: float = 2.0, delta: float = 1e-5, *, clip: float = 1.0, noise_factor: float = 1.0
) -> Subject:
    """Return a clipped update with exactly calibrated isotropic Gaussian noise: a correct mechanism if noise_factor is 1.

    Args:
        d: coordinates.
        epsilon: calibrated for, replace-one.
        delta: calibrated for.
        clip: clip norm C; the two updates have norm C and opposite directions.
        noise_factor: actual noise / noise that the accountant is given (below 1: a faulty implementation).
    """
    std = 2 * clip / gaussian.mu_of(epsilon, delta)
    mean = _pair(d, clip)
    return Subject(
        "plain Gaussian", _noised(mean, isotropic(d, noise_factor * std)), CLIENT_UPLOAD, mean, isotropic(d, std), gaussian=True
    )


def ladp_below_threshold(
    d: int = 1000, epsilon: float = 2.0, delta: float = 1e-5, *, clip: float = 1.0, seed: int = 0
) -> Subject:
    """Return LaDP-FL as published: the second of two layers has a norm just below the threshold R and is released without noise.

    Noise on the first: sigma = c Delta / (epsilon P), P = KL(softmax(local) || softmax(global)), here with exact calibration
    (c / epsilon = 1 / mu). The clients differ in the first layer by the clip, and in the second slightly.

    Source: LaDP-FL, Algorithms 2-4.
    """
    rng = np.random.default_rng(seed)
    first, second = slice(0, 9 * d // 10), slice(9 * d // 10, d)
    base = rng.standard_normal(d) / math.sqrt(d)
    threshold = 1.01 * float(np.linalg.norm(base[second]))
    shift = np.zeros(d)
    shift[first] = clip * base[first] / float(np.linalg.norm(base[first]))
    shift[second] = 1e-3 * base[second]
    locals_ = base - shift / 2, base + shift / 2
    stds: list[Floats] = []
    for weights in locals_:
        scale = np.zeros(d)
        for layer in (first, second):
            if float(np.linalg.norm(weights[layer])) >= threshold:
                log_p, log_q = log_softmax(weights[layer]), log_softmax(np.zeros_like(weights[layer]))
                divergence = float(np.sum(np.exp(log_p) * (log_p - log_q)))
                scale[layer] = clip / (gaussian.mu_of(epsilon, delta) * min(max(divergence, 1e-3), 1.0))
        stds.append(scale)
    std = (stds[0], stds[1])
    return Subject(
        "LaDP-FL, layer below R",
        _noised(locals_, std),
        CLIENT_UPLOAD,
        locals_,
        std,
        layers={"selected": first, "below R": second},
    )


def fedanc(d: int = 1000, *, gamma: float = 0.1, beta: float = 0.5, clip: float = 1.0, masked: bool = False) -> Subject:
    """Return FedANC as published, one step: noise (beta C)^2 on the top gamma d coordinates of the raw gradient.

    All other coordinates are sent without noise. The two clients' gradients have the same magnitudes except for one rank flip at
    the edge of the selection.

    Args:
        d: coordinates.
        gamma: share of coordinates that are noised.
        beta: noise multiplier.
        clip: clip norm C.
        masked: whether only the noised coordinates are sent (which reveals their pattern) or all.

    Source: FedANC, Section 4.
    """
    k = math.ceil(gamma * d)
    if not 0 < k < d:
        raise ConfigError(f"gamma x d must leave a coordinate on either side of the selection, got gamma = {gamma}, d = {d}")
    a: Floats = np.linspace(2.0, 1.0, d)
    a *= clip / float(np.linalg.norm(a))
    b = a.copy()
    b[k - 1], b[k] = a[k], a[k - 1]
    chosen = [np.isin(np.arange(d), np.argsort(-np.abs(g), kind="stable")[:k]) for g in (a, b)]
    std = np.where(chosen[0], beta * clip, 0.0), np.where(chosen[1], beta * clip, 0.0)
    mean = (np.where(chosen[0], a, 0.0), np.where(chosen[1], b, 0.0)) if masked else (a, b)

    def mechanism(world: int, rng: np.random.Generator, /) -> Output:
        vector = mean[world] + std[world] * rng.standard_normal(d)
        return Output(vector, chosen[world]) if masked else Output(vector)

    return Subject("FedANC, mask sent" if masked else "FedANC, all sent", mechanism, CLIENT_UPLOAD, mean, std)


def private_mask(d: int = 1000, epsilon: float = 2.0, delta: float = 1e-5, *, share: float = 0.05, clip: float = 1.0) -> Subject:
    """Return an upload with personalised coordinates set to zero, whose positions depend on private values.

    The private values are raw updates or hidden state. The two clients have the same shared update; their masks differ in one
    coordinate.

    Source: the upload of FedGLP-ADP, Eqs. 7-9, alone, with the mask as part of the client's private state.
    """
    std = 2 * clip / gaussian.mu_of(epsilon, delta)
    k = max(1, int(share * d))
    personal = [np.isin(np.arange(d), np.arange(start, start + k)) for start in (0, 1)]
    update = np.full(d, clip / math.sqrt(d))
    mean = (np.where(personal[0], 0.0, update), np.where(personal[1], 0.0, update))
    noise = (np.where(personal[0], 0.0, std), np.where(personal[1], 0.0, std))
    return Subject("FedGLP-ADP, private mask", _noised(mean, noise), CLIENT_UPLOAD, mean, noise)


def noisy_mask(d: int = 1000, epsilon: float = 2.0, delta: float = 1e-5, *, share: float = 0.05, clip: float = 1.0) -> Subject:
    """Return FedGLP-ADP's mask as printed: the top `share` of the previous NOISY upload becomes personal.

    Both uploads are released, so the mask is a function of releases: unlike `private_mask`, its pattern reveals nothing new. The
    clients differ in the first upload (opposite updates at the clip) and send the same second update, zeros on the mask.

    Source: FedGLP-ADP, Algorithm 2 and the proof of Theorem 1.
    """
    std = 2 * clip / gaussian.mu_of(epsilon, delta)
    first = _pair(d, clip)
    second = np.full(d, clip / math.sqrt(d))
    k = max(1, int(share * d))

    def mechanism(world: int, rng: np.random.Generator, /) -> Output:
        one = first[world] + std * rng.standard_normal(d)
        two = second + std * rng.standard_normal(d)
        two[np.argpartition(-np.abs(one), k)[:k]] = 0.0
        return Output(np.concatenate([one, two]))

    mean = (np.concatenate([first[0], second]), np.concatenate([first[1], second]))
    return Subject("FedGLP-ADP, mask from the noisy upload", mechanism, CLIENT_UPLOAD, mean, isotropic(2 * d, std))


def raw_clip_weights(
    d: int = 1000, epsilon: float = 2.0, delta: float = 1e-5, *, clip: float = 1.0, step: float = 0.4
) -> Subject:
    """Return FedGLP-ADP's clip weights: noise depends on whether a layer's RAW norm grew, so its scale distinguishes the worlds.

    Two layers of equal size; log-odds move by +-`step`, weights are renormalised, C_l^2 = C^2 w_l; the noise std is
    sqrt(2) C_l / z with z calibrated for (epsilon, delta) zero-out. The updates are zero in both worlds: only the scale differs.

    Source: FedGLP-ADP, Algorithm 1.
    """
    z = gaussian.mu_of(epsilon, delta)
    grown = 1 / (1 + math.exp(-step))
    shares = (np.array([grown, 1 - grown]), np.array([1 - grown, grown]))
    half = d // 2
    std = [np.repeat(math.sqrt(2) * clip * np.sqrt(share) / z, [half, d - half]) for share in shares]
    zero = np.zeros(d)
    pair = (std[0], std[1])
    layers = {"first": slice(0, half), "second": slice(half, d)}
    return Subject("FedGLP-ADP, raw clip weights", _noised((zero, zero), pair), CLIENT_UPLOAD, (zero, zero), pair, layers=layers)


def truncated_noise(
    d: int = 1000, epsilon: float = 4.0, delta: float = 1e-7, *, eta: float = 0.5, sensitivity: float = 1.0, spread: bool = False
) -> Subject:
    """Return ALDP-FL's bounded noise: a Gaussian of the classical std, truncated to [-b, b], b = (e^eps - eta) / (e^eps + eta).

    Args:
        d: coordinates.
        epsilon: claimed, per release.
        delta: claimed.
        eta: bounding factor, in (-1, 1).
        sensitivity: L2 distance of the two updates.
        spread: shift all coordinates equally (worse) instead of one.

    Source: ALDP-FL, bounded perturbation mechanism.
    """
    bound = (math.exp(epsilon) - eta) / (math.exp(epsilon) + eta)
    sigma = sensitivity * gaussian.classical_noise_multiplier(epsilon, delta)
    shift = np.full(d, sensitivity / math.sqrt(d)) if spread else sensitivity * np.eye(1, d)[0]
    name = f"ALDP-FL, truncated noise, {'all coordinates' if spread else 'one coordinate'} shifted"
    return truncated_gaussian(shift, sigma, bound, name)


def truncated_gaussian(shift: Floats, sigma: float, bound: float, name: str = "truncated Gaussian") -> Subject:
    """Return a zero update against `shift`, with Gaussian noise of std `sigma` truncated to [-bound, bound] per coordinate.

    Args:
        shift: [d], difference of the two updates.
        sigma: std before truncation, > 0.
        bound: half-width of the support, > 0.
        name: of the subject.
    """
    low = float(ndtr(-bound / sigma))
    mean = (np.zeros(shift.size), shift)

    def mechanism(world: int, rng: np.random.Generator, /) -> Output:
        return Output(mean[world] + sigma * ndtri(low + (1 - 2 * low) * rng.random(shift.size)))

    return Subject(name, mechanism, CLIENT_UPLOAD, mean, isotropic(shift.size, sigma), bounded=True)


def unreachable_mass(shift: NDArray[np.float64], bound: float, sigma: float) -> float:
    """Return the probability that truncated noise plus a shift leaves the unshifted support: a floor for delta at every epsilon.

    Args:
        shift: [d], |shift| <= 2 bound.
        bound: half-width b of the support.
        sigma: std before truncation.
    """
    total = 2 * float(ndtr(bound / sigma)) - 1
    outside = (ndtr(bound / sigma) - ndtr((bound - np.minimum(np.abs(shift), 2 * bound)) / sigma)) / total
    return float(1 - np.prod(1 - outside))
