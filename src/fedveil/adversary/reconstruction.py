"""Reconstruction attacks on what the door let out: ig, dlg, idlg, gradinversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedveil.adversary.attack_options import Options, Outcome, Tell
from fedveil.adversary.attacked_release import interceptions, number
from fedveil.adversary.attacker_knowledge import Interception, caveats
from fedveil.attacks.attack_registry import attack
from fedveil.attacks.attack_types import AttackStep, Reconstruction
from fedveil.attacks.metrics import ImageScores, floors, matched, score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fedveil.adversary.snapshot import Scene
    from fedveil.attacks.attempt import Attack

REFERENCE = 1000
STARTS = {"gradinversion": "seeds"}
"""What `restarts` is called in an attack that starts from several points at once."""


def reconstruction(kind: str, scene: Scene, options: Options, tell: Tell) -> Outcome:
    """Reconstruct images from each intercepted release, and score them against the truth and the floors."""
    config, batch = configured(kind, options), options.batch or 1
    images = options.images or 4 * batch
    count = -(-images // batch)
    total = number(scene, count, options.knows)
    found: list[Reconstruction] = []
    truths: list[Tensor] = []
    ordered: list[Tensor] = []
    releases: list[Interception] = []
    for i, seen in enumerate(interceptions(scene, count, batch, options.knows, options.seed)):
        result = _attack(config, scene, seen, options.seed + i, _counted(tell, i, total))
        truth = scene.bounds.images(seen.x)
        found.append(result)
        releases.append(seen)
        truths.append(truth)
        ordered.append(matched(result.images, truth))
    return _judged(kind, scene, options, batch, found, releases, torch.cat(truths), torch.cat(ordered))


def configured(kind: str, options: Options) -> Attack:
    """The attack with the options' steps, restarts and settings; raises ConfigError for one that it does not take."""
    given: dict[str, Any] = dict(options.settings)
    if options.steps is not None:
        given["steps"] = options.steps
    if options.restarts is not None:
        given[STARTS.get(kind, "restarts")] = options.restarts
    return attack(kind, **given)


def _counted(tell: Tell, done: int, count: int) -> Any:
    """Steps of all releases together: each has the same number at most."""

    def on_step(p: AttackStep) -> None:
        before = done * p.trials * p.steps
        tell(
            before + p.trial * p.steps + p.step,
            count * p.trials * p.steps,
            f"release {done + 1}, start {p.trial + 1}, loss {p.loss:.3g}",
        )

    return on_step


def _attack(config: Attack, scene: Scene, seen: Interception, seed: int, on_step: Any) -> Reconstruction:
    rng = torch.Generator().manual_seed(seed)
    return config.run([seen.upload], scene.make_model, scene.state, seen.known, scene.bounds, rng, on_step)


@dataclass(frozen=True)
class Judged:
    """Scores of all reconstructions, and of an attacker who saw nothing."""

    scores: ImageScores
    floors: dict[str, ImageScores]


def judged(scene: Scene, ordered: Tensor, truth: Tensor, seed: int) -> Judged:
    """Scores with the floors that the public test images give."""
    reference = scene.bounds.images(scene.federation.test[0][:REFERENCE])
    return Judged(score(ordered, truth), floors(truth, reference, seed % 2**31))


def _judged(
    kind: str,
    scene: Scene,
    options: Options,
    batch: int,
    found: Sequence[Reconstruction],
    releases: Sequence[Interception],
    truth: Tensor,
    ordered: Tensor,
) -> Outcome:
    verdict = judged(scene, ordered, truth, options.seed)
    scores, ratios = verdict.scores, [r.noise_ratio for r in found]
    labels = sum(in_common(r.y, s.y, scene.info.classes) for r, s in zip(found, releases, strict=True)) / len(truth)
    rate = sum(r.steps for r in found) / max(sum(r.seconds for r in found), 1e-9)
    record = {
        "scores": scores.summary(),
        "each": {
            "psnr": scores.psnr,
            "ssim": scores.ssim,
            "mse": scores.mse,
            "client": [v.client for s in releases for v in s.victims],
        },
        "floors": {name: s.summary() for name, s in verdict.floors.items()},
        "labels_right": labels,
        "noise_ratio": ratios,
        "steps_per_second": rate,
        "releases": [r.summary() for r in found],
    }
    middle = {name: float(np.median(s.psnr)) for name, s in verdict.floors.items()}
    figures = {
        "PSNR, median (least, most)": f"{np.median(scores.psnr):.1f} dB ({min(scores.psnr):.1f}, {max(scores.psnr):.1f})",
        **({} if scores.ssim is None else {"SSIM, median": f"{np.median(scores.ssim):.3f}"}),
        "success (at least 20 dB)": f"{scores.success:.0%} of {len(scores.psnr)} images",
        "floors: mean image, other image": f"{middle['mean image']:.1f} dB, {middle['other image']:.1f} dB",
        "labels right": f"{labels:.0%}",
        "r = |noise| / |signal|": distinct_ratios(ratios),
        "attack steps a second": f"{rate:.0f}",
    }
    show = truth.ndim == 4 and truth.shape[1] in (1, 3)
    return Outcome(
        figures,
        record,
        [_behind(releases, batch), _effort(found[0]), *caveats(scene, batch)],
        truth[:10] if show else None,
        [(kind, ordered[:10])] if show else (),
    )


def in_common(a: Tensor, b: Tensor, classes: int) -> int:
    """How many labels two collections share, whatever their order."""
    return int(torch.minimum(a.bincount(minlength=classes), b.bincount(minlength=classes)).sum())


def distinct_ratios(ratios: Sequence[float | None]) -> str:
    """The distinct noise ratios, to three digits."""
    known = sorted({float(f"{r:.3g}") for r in ratios if r is not None})
    return ", ".join([f"{r:.3g}" for r in known] + ["unknown"] * (None in ratios))


def _behind(releases: Sequence[Interception], batch: int) -> str:
    local, together = releases[0].known.local, len(releases[0].victims)
    steps = local.steps if local is not None else 1
    who = f"{together} clients summed, each" if together > 1 else "one client"
    return f"each attacked release is of {who} with {_plural(batch, 'example')} and {_plural(steps, 'local step')}"


def _effort(result: Reconstruction) -> str:
    starts = len(result.trial_losses)
    settings = ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.settings.items())
    return f"the best of {_plural(starts, 'start')} by its matching loss counts; settings: {settings}"


def _plural(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
