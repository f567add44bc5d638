"""What the noise sampler's distance from ideal Gaussian noise adds to delta, over a whole run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedveil.accounting.accountant import bound
from fedveil.accounting.sampler_variation import sampler_delta, total_variation
from fedveil.accounting.types import Adjacency, Event
from fedveil.errors import ConfigError
from fedveil.statement.statement import Assumption

if TYPE_CHECKING:
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting


def run_variation(method: Method, s: Setting) -> float:
    """Bound on the total variation between all noise of a run and its ideal law: each draw of each client in each round."""
    clients = s.cohort if s.sampling == "fixed" else s.clients
    draws = clients * s.rounds * (1 if s.example_clip is None else s.steps)
    extras = sum(math.prod(shape) for shape in method.extras(s).values())
    return min(1.0, draws * total_variation(s.layout.dimension + extras))


def charged_bound(events: Sequence[Event], delta: float, variation: float, adjacency: Adjacency) -> tuple[float, str]:
    """Epsilon at `delta` and its accountant: that of ideal noise at delta less what the sampler adds.

    Where the sampler adds 1 % of delta or more it is that of ideal noise, and `ideal_noise` is among the assumptions.

    Args:
        variation: of all noise from its ideal law.
    """
    epsilon, accountant = bound(events, delta, adjacency=adjacency)
    left = charged_delta(epsilon, delta, variation)
    if left == delta:
        return epsilon, accountant
    dearer, name = bound(events, left, adjacency=adjacency)
    added = _added(variation, dearer, delta)
    return (dearer, name) if added is not None and added <= delta - left else (epsilon, accountant)


def charged_delta(epsilon: float, delta: float, variation: float) -> float:
    """Delta less twice what the sampler adds at `epsilon`, or at less; all of it where `ideal_noise` is assumed."""
    return delta * (1 - 2 * (_added(variation, epsilon, delta) or 0.0) / delta)


def sampler_line(variation: float, epsilon: float, delta: float) -> str:
    """What a statement says of the sampler; nothing where `ideal_noise` says it."""
    added = _added(variation, epsilon, delta)
    if added is None:
        return ""
    return (
        f"the noise sampler is within total variation {variation:.2g} of ideal Gaussian noise over the whole run; that adds "
        f"{added:.2g} to delta, which delta = {delta:g} includes"
    )


def ideal_noise(variation: float, epsilon: float, delta: float) -> list[Assumption]:
    """The assumption that a large epsilon needs, since the sampler's distance counts e^epsilon times."""
    if _added(variation, epsilon, delta) is not None:
        return []
    return [
        Assumption(
            f"the noise sampler is ideal, not only within total variation {variation:.2g} over the whole run",
            f"at epsilon = {epsilon:.4g} that distance would add more than 1 % to delta = {delta:g}",
        )
    ]


def _added(variation: float, epsilon: float, delta: float) -> float | None:
    """What is added to delta; None where that is 1 % of it or more. Nothing where nothing is proven."""
    if math.isinf(epsilon):
        return 0.0
    try:
        return sampler_delta(variation, 1, 1, epsilon, delta)
    except ConfigError:
        return None
