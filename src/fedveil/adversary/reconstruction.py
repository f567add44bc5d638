"""Reconstruction attacks on what the door let out: ig, dlg, idlg, gradinversion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedveil.adversary.attack_options import AttackOptions, AttackOutcome, OnProgress
from fedveil.adversary.attacked_release import interceptions, number, single_uploads
from fedveil.adversary.attacker_knowledge import Interception, caveats
from fedveil.attacks.attack_registry import attack
from fedveil.attacks.metrics import floors, matched, score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fedveil.adversary.snapshot import Snapshot
    from fedveil.attacks.attack_types import AttackStep, OnStep, Reconstruction
    from fedveil.attacks.attempt import Attack

REFERENCE = 1000
STARTS = {"gradinversion": "seeds"}
"""What `restarts` is called in an attack that starts from several points at once."""


def reconstruction(kind: str, snapshot: Snapshot, options: AttackOptions, on_progress: OnProgress) -> AttackOutcome:
    """Reconstruct images from each intercepted release, and score them against the truth and the floors."""
    config, batch = configured(kind, options), options.batch or 1
    if options.examples == "test":
        single_uploads(kind, snapshot, options)
    count = -(-(options.images or 4 * batch) // batch)
    total = number(snapshot, count, options.knows)
    pairs: list[tuple[Interception, Reconstruction]] = []
    for i, seen in enumerate(interceptions(snapshot, options, count, batch)):
        rng, on_step = options.generator(i), _counted(on_progress, i, total)
        found = config.run([seen.upload], *snapshot.model, seen.known, snapshot.bounds, rng, on_step)
        pairs.append((seen, found))
    return _judged(kind, snapshot, options, batch, pairs)


def configured(kind: str, options: AttackOptions) -> Attack:
    """The attack with the options' steps, restarts and settings; raises ConfigError for one that it does not take."""
    settings: dict[str, Any] = dict(options.settings)
    if options.steps is not None:
        settings["steps"] = options.steps
    if options.restarts is not None:
        settings[STARTS.get(kind, "restarts")] = options.restarts
    return attack(kind, **settings)


def _counted(on_progress: OnProgress, done: int, count: int) -> OnStep:
    """Steps of all releases together: each has the same number at most."""

    def on_step(p: AttackStep) -> None:
        each = p.trials * p.steps
        what = f"release {done + 1}, start {p.trial + 1}, loss {p.loss:.3g}"
        on_progress(done * each + p.trial * p.steps + p.step, count * each, what)

    return on_step


def _judged(
    kind: str,
    snapshot: Snapshot,
    options: AttackOptions,
    batch: int,
    pairs: Sequence[tuple[Interception, Reconstruction]],
) -> AttackOutcome:
    bounds, found = snapshot.bounds, [r for _, r in pairs]
    originals = [bounds.images(seen.x) for seen, _ in pairs]
    truth = torch.cat(originals)
    ordered = torch.cat([matched(r.images, images) for r, images in zip(found, originals, strict=True)])
    scores = score(ordered, truth)
    seen_nothing = floors(truth, bounds.images(snapshot.federation.test[0][:REFERENCE]), options.seed % 2**31)
    labels = sum(in_common(r.y, seen.y, snapshot.info.classes) for seen, r in pairs) / len(truth)
    rate = sum(r.steps for r in found) / max(sum(r.seconds for r in found), 1e-9)
    ratios = [r.noise_ratio for r in found]
    record = {
        "scores": scores.summary(),
        "each": {
            "psnr": scores.psnr,
            "ssim": scores.ssim,
            "mse": scores.mse,
            "mae": scores.mae,
            "client": [v.client for seen, _ in pairs for v in seen.victims],
        },
        "floors": {name: s.summary() for name, s in seen_nothing.items()},
        "labels_right": labels,
        "noise_ratio": ratios,
        "steps_per_second": rate,
        "releases": [r.summary() for r in found],
    }
    middle = {name: float(np.median(s.psnr)) for name, s in seen_nothing.items()}
    figures = {
        "PSNR, median (least, most)": f"{np.median(scores.psnr):.1f} dB ({min(scores.psnr):.1f}, {max(scores.psnr):.1f})",
        **({} if scores.ssim is None else {"SSIM, median": f"{np.median(scores.ssim):.3f}"}),
        "success (at least 20 dB)": f"{scores.success:.0%} of {len(scores.psnr)} images",
        "floors: mean image, other image": f"{middle['mean image']:.1f} dB, {middle['other image']:.1f} dB",
        "labels right": f"{labels:.0%}",
        "r = |noise| / |signal|": distinct_ratios(ratios),
        "attack steps a second": f"{rate:.0f}",
    }
    words = [_behind(pairs[0][0], batch), _effort(found[0]), *caveats(snapshot, batch)]
    if truth.ndim != 4 or truth.shape[1] not in (1, 3):
        return AttackOutcome(figures, record, words)
    return AttackOutcome(figures, record, words, truth[:10], [(kind, ordered[:10])])


def in_common(a: Tensor, b: Tensor, classes: int) -> int:
    """How many labels two collections share, whatever their order."""
    return int(torch.minimum(a.bincount(minlength=classes), b.bincount(minlength=classes)).sum())


def distinct_ratios(ratios: Sequence[float | None]) -> str:
    """The distinct noise ratios, to three digits."""
    known = sorted({float(f"{r:.3g}") for r in ratios if r is not None})
    return ", ".join([f"{r:.3g}" for r in known] + ["unknown"] * (None in ratios))


def _behind(seen: Interception, batch: int) -> str:
    local, together = seen.known.local, len(seen.victims)
    steps = local.steps if local is not None else 1
    who = f"{together} clients summed, each" if together > 1 else "one client"
    return f"each attacked release is of {who} with {_plural(batch, 'example')} and {_plural(steps, 'local step')}"


def _effort(result: Reconstruction) -> str:
    starts = len(result.trial_losses)
    settings = ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.settings.items())
    return f"the best of {_plural(starts, 'start')} by its matching loss counts; settings: {settings}"


def _plural(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
