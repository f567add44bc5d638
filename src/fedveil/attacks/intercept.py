"""From what the door of a federation let out to what an attacker reads, and what attacks leave in a run's directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.attacks.metrics import floors, matched, score
from fedveil.attacks.pictures import save_comparison
from fedveil.attacks.simulate import split
from fedveil.attacks.types import LocalSpec, Result, Upload
from fedveil.params import Layout
from fedveil.release import plan as release


def intercepted(
    upload: release.Upload, layout: Layout, n_examples: int, local: LocalSpec, signal_norm: float | None = None
) -> Upload:
    """An upload of the door (a change of weights, flat) as an attacker reads it.

    The standard deviations and the support are those the door declares; pass them on in `Knowledge` for an adaptive attack.
    signal_norm: L2 norm of the clipped update, for the record.
    """
    like = {k: torch.empty(shape) for k, shape in zip(layout.names, layout.shapes, strict=True)}
    support = None if upload.support is None else split(upload.support, like)
    return Upload(
        tensors=split(upload.vector, like),
        kind="delta",
        n_examples=n_examples,
        local=local,
        noise_std=dict(zip(layout.names, upload.noise_std.tolist(), strict=True)),
        sent_mask=support,
        signal_norm=signal_norm,
    )


def save(result: Result, truth: Tensor, reference: Tensor, folder: str | Path) -> dict[str, Any]:
    """Write attack-<name>.json (summary, scores, floors) and attack-<name>.png (originals beside reconstructions).

    truth: the attacked images in [0, 1], (n, *shape); the reconstructions are put in their order. reference: other images, for
    the floors. Returns what the JSON file holds.
    """
    ordered = matched(result.images, truth)
    beside: Mapping[str, Any] = {name: s.summary() for name, s in floors(truth, reference, result.seed % 2**31).items()}
    record = {"result": result.summary(), "scores": score(ordered, truth).summary(), "floors": beside}
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / f"attack-{result.attack}.json").write_text(json.dumps(record, indent=2, default=str), encoding="utf-8")
    if truth.ndim == 4 and truth.shape[1] in (1, 3):
        rows = [(f"{result.attack}{' adaptive' if result.adaptive else ''}", ordered[:10])]
        save_comparison(target / f"attack-{result.attack}.png", truth[:10], rows)
    return record
