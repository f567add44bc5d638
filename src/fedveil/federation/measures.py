"""What a round's record tells about its releases and about the method: noise, clip, coordinates, bytes, own figures."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedveil.federation.history import declared, reserved
from fedveil.federation.private_code import found_by
from fedveil.federation.server_step import whole_clip
from fedveil.mechanism.cost import per_layer
from fedveil.mechanism.plan import LocalDpSgd
from fedveil.methods.method import weighting_of
from fedveil.methods.parts import CoverageMean
from fedveil.release.evaluation_counts import COUNTS
from fedveil.training.local import HasMetrics

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.federation.history import Record
    from fedveil.federation.progress import Federation, Progress
    from fedveil.federation.round import Context, Outcome
    from fedveil.mechanism.plan import Upload
    from fedveil.training.local import State
    from fedveil.training.params import Layout

Figures = Mapping[str, float | list[float]]


_CLEAR = 3.0
"""A noisy number of examples below so many standard deviations of its noise says nothing."""


def release_measures(federation: Federation, uploads: list[Upload], outcomes: list[Outcome]) -> Record:
    """What can be read off the releases: noise and clip per layer, coordinates, bytes."""
    layout = federation.context.door.layout
    by_coverage = isinstance(federation.method.server(federation.setting), CoverageMean)
    sent = [layout.dimension if u.support is None else int(u.support.sum()) for u in uploads]
    senders = sum(o.release is not None for o in outcomes) if uploads[0].client < 0 else 1
    return {
        **_noise(_variances(federation, uploads, outcomes), uploads, layout, by_coverage=by_coverage),
        **_clips(uploads, layout),
        "coordinates": sum(sent) / len(sent),
        "uplink_bytes": 4 * sum(sent) * senders,
    }


def _clips(uploads: Sequence[Upload], layout: Layout) -> Record:
    """The clip of the updates; under DP-SGD, where each example's gradient is clipped instead, that and the batch."""
    steps = [u.plan.step for u in uploads if isinstance(u.plan, LocalDpSgd)]
    if len(steps) == len(uploads):
        return {
            "example_clip": sum(step.clip for step in steps) / len(steps),
            "expected_batch": sum(step.expected for step in steps) / len(steps),
        }
    bounds = (u.plan.clip if u.plan.layer_clip is None else u.plan.layer_clip for u in uploads)
    clips = torch.tensor([per_layer(bound, layout) for bound in bounds])
    return {"clip": sum(whole_clip(u.plan) for u in uploads) / len(uploads), "layer_clip": clips.mean(0).tolist()}


def _variances(federation: Federation, uploads: list[Upload], outcomes: list[Outcome]) -> list[Tensor]:
    """Mean variance of the noise on what each upload sent of each layer [L]: the door's, and what training drew."""
    layout = federation.context.door.layout
    weights = {o.client: o.release.weight for o in outcomes if o.release is not None}
    drawn = {o.client: o.noise_power for o in outcomes if o.noise_power is not None and o.client in weights}
    denominator = federation.setting.cohort if weighting_of(federation.method) == "uniform" else sum(weights.values())
    result = []
    for u in uploads:
        variance = u.noise_std.square()
        if u.client in drawn:
            variance = variance + drawn[u.client] / torch.tensor(_counts(u, layout)).clamp_min(1.0)
        elif u.client < 0 and drawn:
            shares = torch.zeros(len(layout))
            for c, own in drawn.items():
                shares = shares + own * (weights[c] / denominator) ** 2
            variance = variance + shares / torch.tensor(_counts(u, layout)).clamp_min(1.0)
        result.append(variance)
    return result


def _noise(variances: list[Tensor], uploads: list[Upload], layout: Layout, *, by_coverage: bool) -> Record:
    """Noise of the global step: expected norm, and root mean square per layer over the coordinates that somebody sent.

    Empty where training drew noise of which nothing is known (NaN).
    """
    total = sum(u.weight for u in uploads)
    if by_coverage and any(u.support is not None for u in uploads):
        variance, weight = torch.zeros(layout.dimension), torch.zeros(layout.dimension)
        for u, v in zip(uploads, variances, strict=True):
            there = torch.ones(layout.dimension) if u.support is None else u.support.float()
            variance.add_(layout.expand(v * u.weight**2) * there)
            weight.add_(there, alpha=u.weight)
        variance /= weight.square().where(weight > 0, torch.ones_like(weight))
        noise_power = torch.stack([part.sum() for part in layout.split(variance)])
        reached = torch.stack([(part > 0).sum() for part in layout.split(weight)]).float()
    else:
        counts, each = torch.tensor([_counts(u, layout) for u in uploads]), torch.stack(variances)
        shares = torch.tensor([[(u.weight / total) ** 2] for u in uploads], dtype=each.dtype)
        summands = (each * shares * counts).numpy()
        noise_power = torch.from_numpy(np.add.accumulate(summands)[-1])  # one upload after the other
        reached = counts.amax(0)
    if noise_power.isnan().any():
        return {}
    return {
        "noise_norm": float(noise_power.sum().sqrt()),
        "layer_noise_std": (noise_power / reached.clamp_min(1.0)).sqrt().tolist(),
    }


def evaluation_figures(federation: Federation, uploads: Sequence[Upload], senders: int) -> Record:
    """What the counts of a round say of the model with which it began: post-processing of what was released.

    Args:
        uploads: of the round, or one mean of them. senders: how many uploads left the clients.

    `noisy_METRIC` with the standard deviation of its noise, and `noisy_examples`; nothing where these drown in the noise.
    """
    s = federation.setting
    if s.evaluation is None or not uploads:
        return {}
    summed = uploads[0].client < 0
    divided_by = s.cohort if federation.context.summed else senders
    counts = torch.stack([u.extras[COUNTS] for u in uploads]).double().sum(0)
    shares = divided_by if summed and uploads[0].plan.place == "upload" else 1  # noise in shares, as many as are planned
    noise = math.sqrt(shares * sum(u.plan.extras[COUNTS].noise_std ** 2 for u in uploads))
    right, wrong = (counts * (divided_by if summed else 1)).tolist()
    total = right + wrong
    if not total >= _CLEAR * math.sqrt(2) * noise:
        return {}
    share, metric = right / total, f"noisy_{s.task.main.name}"
    deviation = noise * math.hypot(share, 1 - share) / total
    return {metric: min(max(share, 0.0), 1.0), f"{metric}_std": deviation, "noisy_examples": total}


def method_measures(federation: Federation, progress: Progress, clients: list[int]) -> Record:
    """The figures of this round's policies and objectives (see `HasMetrics`): means over the clients, and each client's own.

    An objective's are private, and so are named apart where a column has their name; what it fails to measure, or measures in
    another shape than a number or one for each layer, is left out.
    """
    context = federation.context
    taken = reserved(federation.method, context.objective, declared(context.task, context.objective, context.policy.part))
    shapes = ((), (len(context.model.layout),))
    policies = [progress.common] if context.summed else [progress.policies.get(c, {}) for c in clients]
    row: Record = {}
    own: dict[int, dict[str, Any]] = {c: {} for c in clients}
    for part, states in ((context.objective, [progress.privates.get(c, {}) for c in clients]), (context.policy.part, policies)):
        if isinstance(part, HasMetrics):
            if part is context.objective:
                measured = [_measured(part, state, (taken, shapes), context) for state in states]
            else:
                measured = [part.measures(state) if state else {} for state in states]
            row.update(_means(measured))
            if len(measured) == len(clients) and not (context.summed and part is context.policy.part):
                for c, cells in zip(clients, measured, strict=True):
                    own[c].update((key, value) for key, value in cells.items() if not isinstance(value, list))
    if any(own.values()):
        row["by_client"] = [{"client": c, **cells} for c, cells in own.items() if cells]
    return row


def _measured(
    objective: HasMetrics, state: State, allowed: tuple[Container[str], Container[tuple[int, ...]]], context: Context
) -> Figures:
    """What an objective measures of a client's state; nothing where that fails: how a run ends is seen by all.

    Args:
        allowed: names that are taken, and shapes that a figure may have.
    """
    taken, shapes = allowed

    def measured() -> dict[str, Any]:
        return {str(name): np.asarray(value, dtype=float).tolist() for name, value in objective.measures(state).items()}

    def apart(name: str) -> str:
        return apart(f"objective_{name}") if name in taken or name.startswith("test_") else name

    figures = found_by(measured, context) if state else None
    return {apart(name): value for name, value in (figures or {}).items() if np.shape(value) in shapes}


def _means(rows: Sequence[Figures]) -> Record:
    """Of each figure, over those that have it, as a number or as a list of one length."""
    found: dict[str, list[float | list[float]]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if len({np.shape(value) for value in values}) == 1:
            found[name] = values
    return {name: np.mean(values, axis=0).tolist() for name, values in found.items()}


def _counts(upload: Upload, layout: Layout) -> list[float]:
    """Coordinates sent of each layer [L]."""
    sent = layout.sizes if upload.support is None else [int(part.sum()) for part in layout.split(upload.support)]
    return [float(n) for n in sent]
