"""From what the door of a federation let out to what an attacker reads."""

from __future__ import annotations

import torch

from fedveil.attacks.attack_types import CapturedUpload, Clip, KnownTraining
from fedveil.attacks.simulate import split
from fedveil.mechanism import plan as release
from fedveil.training.params import Layout


def intercepted(
    upload: release.Upload, layout: Layout, n_examples: int, local: KnownTraining, signal_norm: float | None = None
) -> CapturedUpload:
    """An upload of the door (a change of weights, flat) as an attacker reads it.

    The standard deviations and the support are those the door declares; pass them on in `Knowledge` for an adaptive attack.
    Where nothing was sent there is no noise either.
    signal_norm: L2 norm of the clipped update, for the record.
    """
    like = {k: torch.empty(shape) for k, shape in zip(layout.names, layout.shapes, strict=True)}
    tensors = split(upload.vector, like)
    support = None if upload.support is None else split(upload.support, like)
    stds = dict(zip(layout.names, upload.noise_std.tolist(), strict=True))
    return CapturedUpload(
        tensors=tensors,
        kind="delta",
        n_examples=n_examples,
        local=local,
        noise_std=stds if support is None else {k: std * support[k].float() for k, std in stds.items()},
        sent_mask=support,
        signal_norm=signal_norm,
    )


def clip_of(plan: release.Plan, layout: Layout) -> Clip:
    """The bounds of a plan by the names of the parameters."""
    if plan.layer_clip is None:
        return Clip(plan.clip)
    return Clip(plan.clip, dict(zip(layout.names, plan.layer_clip.tolist(), strict=True)))
