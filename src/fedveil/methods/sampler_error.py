"""What the noise sampler's distance from ideal Gaussian noise adds to delta, over a whole run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedveil.accounting import accountant
from fedveil.accounting.sampler_variation import sampler_delta, total_variation
from fedveil.accounting.types import Adjacency, Event
from fedveil.errors import ConfigError
from fedveil.methods.method import extras_of

if TYPE_CHECKING:
    from fedveil.accounting.chosen_run import Selection
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting


def run_variation(method: Method, s: Setting) -> float:
    """Bound on the total variation between all that a run draws and its ideal law: noise of each client, and Poisson samples.

    Of a search it is that of all its runs and their scores, by their expected number.
    """
    clients = s.cohort if s.sampling == "fixed" else s.clients
    draws = clients * s.rounds * (1 if s.example_clip is None else s.steps)
    extras = sum(math.prod(shape) for shape in extras_of(method, s).values())
    one = draws * total_variation(s.layout.dimension + extras)
    if s.sampling == "poisson":  # a word for each client
        one += s.rounds * total_variation(s.clients)
    if s.example_clip is not None:  # a word for each example that can join
        one += draws * total_variation(s.example_cap)
    if s.selection is not None:
        one = s.selection.runs * (one + total_variation(1))
    return min(1.0, one)


def charged_bound(
    events: Sequence[Event], delta: float, variation: float, adjacency: Adjacency, selection: Selection | None = None
) -> tuple[float, str]:
    """Epsilon at `delta` and its accountant: that of ideal noise at delta less what the sampler adds.

    Where the sampler adds 1 % of delta or more it is that of ideal noise, which is among the assumptions.

    Args:
        variation: of all noise from its ideal law. selection: how the run with these releases was chosen.
    """

    def bound(delta: float) -> tuple[float, str]:
        if selection is not None:
            return selection.bound(events, delta, adjacency)
        return accountant.bound(events, delta, adjacency=adjacency)

    epsilon, name = bound(delta)
    left = charged_delta(epsilon, delta, variation)
    if left == delta:
        return epsilon, name
    dearer, its_name = bound(left)
    added = sampler_adds(variation, dearer, delta)
    return (dearer, its_name) if added is not None and added <= delta - left else (epsilon, name)


def charged_delta(epsilon: float, delta: float, variation: float) -> float:
    """Delta less twice what the sampler adds at `epsilon`, or at less; all of it where ideal noise is assumed."""
    return delta * (1 - 2 * (sampler_adds(variation, epsilon, delta) or 0.0) / delta)


def sampler_line(variation: float, epsilon: float, delta: float) -> str:
    """What a statement says of the sampler; nothing where ideal noise is assumed."""
    added = sampler_adds(variation, epsilon, delta)
    if added is None:
        return ""
    return (
        f"the noise sampler is within total variation {variation:.2g} of ideal Gaussian noise over the whole run; that adds "
        f"{added:.2g} to delta, which delta = {delta:g} includes"
    )


def sampler_adds(variation: float, epsilon: float, delta: float) -> float | None:
    """What the sampler adds to delta; None where that is 1 % of it or more. Nothing where nothing is proven."""
    if math.isinf(epsilon):
        return 0.0
    try:
        return sampler_delta(variation, 1, 1, epsilon, delta)
    except ConfigError:
        return None
