"""Noise that changes from round to round by a plan fixed beforehand, at the cost of constant noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fedveil.accounting.types import Event, SampledGaussian, View
from fedveil.mechanism.cost import event_of
from fedveil.methods.base import Method, Scheduled, Setting, calibrated, gaussian_plan, gaussian_releases


def priced(s: Setting, shape: Sequence[float]) -> list[float]:
    """Noise multipliers z_t in proportion to `shape` of which the dearest rounds that a client can be in cost what z does in all.

    sum over the P largest of 1 / z_t^2 = P / z^2, P the most rounds of one client.
    """
    dearest = sorted(shape)[: s.participations]
    scale = (sum(x**-2 for x in dearest) / len(dearest)) ** 0.5
    return [s.z * scale * x for x in shape]


def scheduled(s: Setting, clip: float, shape: Sequence[float]) -> Scheduled:
    """Updates clipped to C with noise z_t C, at the cost of noise z C in each round; or DP-SGD in the clients with z_t."""
    return Scheduled(tuple(gaussian_plan(replace(s, noise_multiplier=z), clip) for z in priced(s, shape)))


def scheduled_releases(plans: Callable[[Setting], Scheduled], s: Setting, view: View) -> list[Event]:
    """f / z a round in all; or one event a round where batches or cohorts are sampled, since that is no function of the sum.

    Under DP-SGD these are the dearest rounds that one client can be in.

    Args:
        plans: makes those of all rounds, where they are asked for.
    """
    scope = replace(s.scope, view=view)
    if s.example_clip is not None and s.z > 0:
        events = [event_of(plan, s.layout, scope, rate=None, round=t) for t, plan in enumerate(plans(s).plans)]
        steps = [event for event in events if isinstance(event, SampledGaussian)]
        return [*sorted(steps, key=lambda event: event.noise_multiplier)[: s.participations]] or events[:1]
    if not s.amplified or view is View.SERVER or s.z == 0:
        return gaussian_releases(s, view)
    return [event_of(plan, s.layout, scope, rate=s.rate, round=t) for t, plan in enumerate(plans(s).plans)]


def calibrated_schedule(method: Method, s: Setting) -> Setting:
    """The noise for the configured epsilon; where sampling amplifies, by Renyi accounting, as the budget of unequal rounds is."""
    unequal = s.example_clip is not None or (s.amplified and s.scope.view is not View.SERVER)
    return calibrated(method, s, accountant="rdp" if unequal else "auto")
