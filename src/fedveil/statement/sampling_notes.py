"""What a run would cost if more, or less, of its sampling were seen, and what a user with several records gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedveil.accounting.accountant import bound
from fedveil.accounting.formatting import at_most
from fedveil.accounting.secret_samples import is_amplified
from fedveil.accounting.types import (
    Adjacency,
    Event,
    FixedSampleGaussian,
    Gaussian,
    SampledGaussian,
    SeenCountGaussian,
    Unit,
    UserRecordsGaussian,
    View,
)
from fedveil.methods.base import Fixed
from fedveil.methods.method import participation_of
from fedveil.statement.scope_checks import neighbouring_pair

if TYPE_CHECKING:
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting

MATTERS = 1.01
"""Epsilons are quoted side by side where they differ by this factor."""

_RECORDS = (2, 10)


def seen_count_epsilon(s: Setting, events: Sequence[Event], epsilon: float, *, memoryless: bool) -> float | None:
    """Epsilon where the number of participants of each round is seen, if it is more than 1 % above `epsilon`; else None.

    Args:
        events: of the run. epsilon: proven of them with a hidden number.
        memoryless: clients keep nothing of one round for the next. Else what they send later may tell who took part, and then
            nothing is left of the crowd: the only one whose number is seen is the client itself.

    Source: docs/privacy-theorems.md, "The number of participants is seen".
    """
    if s.example_clip is not None:
        return None
    honest = max(s.clients - s.colluders, 1) if memoryless else 1
    seen: list[Event] = [
        SeenCountGaussian(honest, e.rate, e.noise_multiplier, e.count) if isinstance(e, SampledGaussian) else e for e in events
    ]
    if not any(map(is_amplified, seen)):
        return None
    found, _ = bound(seen, s.delta, adjacency=neighbouring_pair(s.scope, per_example=False))
    return found if found > MATTERS * epsilon else None


def sampling_notes(method: Method, s: Setting, events: Sequence[Event], *, memoryless: bool) -> tuple[str, ...]:
    """Remarks on the run's own view, whose releases are `events`; they change nothing of what is proven.

    Args:
        memoryless: clients keep nothing of one round for the next, which each sample's being drawn afresh rests on.
    """
    secret = _secret_sample(method, s, events) if memoryless else ""
    return tuple(filter(None, (secret, _several_records(s, events))))


def _secret_sample(method: Method, s: Setting, events: Sequence[Event]) -> str:
    """What a sample of fixed size would give if nobody saw it, for runs whose every round costs the same Gaussian release."""
    afresh = s.max_participations is None and s.min_survivors is None and participation_of(method, s) is None
    summed = s.scope.view is not View.SERVER and s.example_clip is None and isinstance(method.release(s), Fixed)
    if not (afresh and summed and s.colluders == 0 and s.sampling == "fixed" and s.cohort < s.clients):
        return ""
    if not all(isinstance(event, Gaussian) and event.mu > 0 for event in events):
        return ""
    rounds = [event for event in events if isinstance(event, Gaussian)]
    if sum(event.count for event in rounds) != s.rounds:
        return ""
    sampled = [FixedSampleGaussian(s.clients, s.cohort, 1 / event.mu, event.count) for event in rounds]
    pair = neighbouring_pair(s.scope, per_example=False)
    full, secret = (bound(e, s.delta, adjacency=pair)[0] for e in (rounds, sampled))
    if secret * MATTERS > full:
        return ""
    return (
        f"{s.cohort} of {s.clients} clients are drawn afresh in each round: against whoever sees the sums and never learns who "
        f"was drawn, epsilon = {at_most(secret)}; the proven number does not count on that secrecy"
    )


def _several_records(s: Setting, events: Sequence[Event]) -> str:
    """What DP-SGD promises a user who holds several records of one client; where records are left out, the price is exact."""
    if s.example_clip is None or s.scope.unit is not Unit.RECORD or s.scope.adjacency is not Adjacency.ZERO_OUT:
        return ""
    sampled = [event for event in events if isinstance(event, SampledGaussian)]
    if not sampled or len(sampled) < len(events):
        return ""
    found = []
    for k in (k for k in _RECORDS if k <= s.records):
        costs = [UserRecordsGaussian(k, event.rate, event.noise_multiplier, event.count) for event in sampled]
        found.append(f"{at_most(bound(costs, s.delta, adjacency=s.scope.adjacency)[0])} with {k} records")
    if not found:
        return ""
    return f"a user with several records at one client is protected less: epsilon = {', '.join(found)} (at delta = {s.delta:g})"
