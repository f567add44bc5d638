"""Noise against signal for a configuration, and what would let it learn at the same epsilon, by solving for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from fedveil.accounting.accountant import AccountantName, bound, calibrate
from fedveil.accounting.learnability import (
    TARGET_RATIO,
    Advice,
    Learnability,
    Level,
    dimension_for,
    multiplier_for,
    noise_norm,
    verdict_of,
)
from fedveil.accounting.secret_samples import is_amplified
from fedveil.accounting.types import Adjacency, Event, SampledGaussian, Unbounded, View
from fedveil.errors import ConfigError
from fedveil.methods.run_cost import events_in_view
from fedveil.statement.scope_checks import neighbouring_pair
from fedveil.statement.statement import VIEWS

if TYPE_CHECKING:
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting


def learnability(method: Method, s: Setting, epsilon: float) -> Learnability | None:
    """Return the block of the statement, or None if noise and signal have no known ratio (no clip, or no noise to scale).

    Args:
        s: with its noise multiplier known. epsilon: finite, held fixed in each view.
    """
    clip = _clip(method, s)
    if clip is None or not s.noise_multiplier or not 0 < epsilon < math.inf:
        return None
    own, steps = own_level(method, s)
    assert own.ratio is not None
    levels = tuple(own if view is s.scope.view else _other(method, s, clip, view, epsilon) for view in VIEWS)
    return Learnability(
        epsilon=epsilon,
        delta=s.delta,
        scope=s.scope,
        clip=clip,
        what="mean update" if s.example_clip is None else "mean gradient of a local step over the clients of a round",
        levels=levels,
        verdict=verdict_of(own.ratio, steps),
        steps=steps,
        advice=()
        if own.ratio <= TARGET_RATIO
        else (_clients(method, s, epsilon), _rounds(method, s, epsilon), _dimension(s, own.ratio)),
    )


def _clip(method: Method, s: Setting) -> float | None:
    """Return the bound on the norm of what is averaged, or None if it has none."""
    clip = s.example_clip if s.example_clip is not None else method.clip_norm(s)
    return clip if clip is not None and math.isfinite(clip) else None


def own_level(method: Method, s: Setting) -> tuple[Level, int]:
    """Noise against signal in the run's own view, and over how many steps it averages out.

    Args:
        s: with its noise multiplier known.

    Raises:
        ConfigError: updates are not clipped.
    """
    clip = _clip(method, s)
    if clip is None:
        raise ConfigError(f"{method.name} clips no updates here, so noise and signal have no known ratio")
    return _level(s, clip, s.scope.view, s.z), s.rounds if s.example_clip is None else s.rounds * s.steps


def _on_sum(s: Setting, view: View) -> bool:
    return view is not View.SERVER and s.example_clip is None


def _batch(s: Setting) -> float:
    """Return the number of examples over which DP-SGD averages its noise in a local step; 1 if noise is not per step."""
    step = s.dp_sgd() if s.example_clip is not None else None
    return 1.0 if step is None else step.rate * s.known_records


def _level(s: Setting, clip: float, view: View, z: float) -> Level:
    norm = noise_norm(z * s.sum_noise * clip / _batch(s), s.layout.dimension, s.cohort, on_sum=_on_sum(s, view))
    return Level(view, z, norm, norm / clip)


def _other(method: Method, s: Setting, clip: float, view: View, epsilon: float) -> Level:
    """Return the level of another view, for a run that promises the same epsilon in that view."""
    place = "sum" if view is View.SERVER else s.noise_place
    moved = replace(s, scope=replace(s.scope, view=view), epsilon=epsilon, noise_place=place)

    def events(z: float) -> list[Event]:
        return events_in_view(method, replace(moved, noise_multiplier=z), view)

    try:
        trial = events(1.0)
        lost = next((event.reason for event in trial if isinstance(event, Unbounded)), None)
        if lost is not None:
            return Level(view, note=lost)
        if events(s.z) == events_in_view(method, s, s.scope.view) and _on_sum(s, view) == _on_sum(s, s.scope.view):
            return _level(moved, clip, view, s.z)
        z = calibrate(epsilon, s.delta, events, accountant=_quick(trial), adjacency=_pair(s), tolerance=1e-4)
        return _level(moved, clip, view, z)
    except ConfigError as problem:
        return Level(view, note=str(problem))


def _pair(s: Setting) -> Adjacency:
    return neighbouring_pair(s.scope, per_example=s.example_clip is not None)


def _quick(events: list[Event]) -> AccountantName:
    """Return epsilon: exact without sampling; with it, the Renyi bound, which is fast and a little above the best one."""
    sampled = [event for event in events if is_amplified(event)]
    if not sampled:
        return "gdp"
    return "rdp" if all(isinstance(event, SampledGaussian) for event in sampled) else "auto"


def _affordable(method: Method, s: Setting, epsilon: float) -> bool:
    """Return whether `s`, with the noise that meets the target ratio, costs at most epsilon."""
    z = multiplier_for(TARGET_RATIO, s.layout.dimension, s.cohort, on_sum=_on_sum(s, s.scope.view)) * _batch(s) / s.sum_noise
    try:
        events = events_in_view(method, replace(s, noise_multiplier=z), s.scope.view)
        return bound(events, s.delta, accountant=_quick(events), adjacency=_pair(s))[0] <= epsilon
    except ConfigError:
        return False


def _least(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """Return the least integer in [low, high] from which on `holds` is true, or None."""
    if low > high or not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high


def _clients(method: Method, s: Setting, epsilon: float) -> Advice:
    within = _least(s.cohort + 1, s.clients, lambda n: _affordable(method, replace(s, cohort=n), epsilon))
    if within is not None:
        text = f"{within:,} clients per round instead of {s.cohort:,}, of the same {s.clients:,} clients"
        return Advice("clients a round", s.cohort, within, s.clients, text)

    def grown(n: int) -> Setting:
        return replace(s, cohort=n, clients=math.ceil(n * s.clients / s.cohort))

    n = _least(s.cohort + 1, 10**12, lambda n: _affordable(method, grown(n), epsilon))
    if n is None:
        return Advice("clients a round", s.cohort, None, s.clients, "no number of clients per round is enough by itself")
    population = grown(n).clients
    text = (
        f"{n:,} clients per round instead of {s.cohort:,}, which takes a population of {population:,} clients instead of "
        f"{s.clients:,}"
    )
    return Advice("clients a round", s.cohort, n, population, text)


def _rounds(method: Method, s: Setting, epsilon: float) -> Advice:
    fewer = _least(1, s.rounds - 1, lambda k: _affordable(method, replace(s, rounds=s.rounds - k), epsilon))
    if fewer is None:
        return Advice("rounds", s.rounds, None, s.clients, "no smaller number of rounds is enough by itself")
    rounds = s.rounds - fewer
    return Advice(
        "rounds", s.rounds, rounds, s.clients, f"{rounds} rounds instead of {s.rounds}, if the task can be learned in them"
    )


def _dimension(s: Setting, ratio: float) -> Advice:
    d = s.layout.dimension
    z = (s.noise_multiplier or 0.0) * s.sum_noise / _batch(s)
    most = dimension_for(TARGET_RATIO, z, s.cohort, on_sum=_on_sum(s, s.scope.view))
    if most < 1:
        return Advice("dimension", d, None, s.clients, "not even a single coordinate would be enough by itself")
    text = f"{most:,} trained coordinates instead of {d:,} (frozen layers, low-rank or sparse updates, a smaller network)"
    return Advice("dimension", d, most, s.clients, text)
