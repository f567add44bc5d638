"""Attacks on an intercepted release: inference of labels and senders, reconstruction of examples."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedveil.attacks import labels as ids
from fedveil.attacks import labels as single
from fedveil.attacks.attack_options import AttackOptions, AttackOutcome, OnProgress, attack
from fedveil.attacks.interception import Interception, caveats, interceptions, number, single_uploads
from fedveil.attacks.labels import counted, label_counts
from fedveil.attacks.matching import read
from fedveil.attacks.metrics import floors, matched, score
from fedveil.attacks.reconstruction import IG
from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from fedveil.attacks.attack_types import AttackStep, OnStep, Reconstruction
    from fedveil.attacks.reconstruction import Attack
    from fedveil.attacks.snapshot import Snapshot


# --- labels --------------------------------------------------------------------------------------------------------------


def labels(kind: str, snapshot: Snapshot, options: AttackOptions, on_progress: OnProgress) -> AttackOutcome:
    """How many examples of each class are behind a release, from the gradient of the last bias."""
    options.settings_of(kind, {})
    batch = options.batch or 32
    count = -(-(options.images or 10 * batch) // batch)
    exact, hit, guessed, n, ratios = 0, 0, 0, 0, []
    for seen in _captured(snapshot, options, count, batch, on_progress):
        target = read([seen.upload], *snapshot.model, seen.known)[0]
        counts = counted(target, _auxiliary(snapshot, seen.known.aux_inputs, options), len(seen.y))
        truth = seen.y.bincount(minlength=len(counts))
        exact += int(torch.equal(counts, truth))
        hit += int(torch.minimum(counts, truth).sum())
        alike = label_counts(torch.zeros(len(counts)), torch.full((len(counts),), 1 / len(counts)), len(seen.y))
        guessed += int(torch.minimum(alike, truth).sum())
        n += len(seen.y)
        ratios.append(seen.upload.noise_ratio)
    total = len(ratios)
    figures = {
        "releases with every count right": f"{exact} of {total}",
        "labels right": f"{hit / n:.1%} of {n}",
        "floor: all classes alike": f"{guessed / n:.1%}",
        "r = |noise| / |signal|": middle(ratios),
    }
    record = {
        "all_counts_right": exact / total,
        "labels_right": hit / n,
        "floors": {"all classes alike": guessed / n},
        "noise_ratio": ratios,
        "examples": n,
    }
    return AttackOutcome(figures, record, [f"{n // total} examples behind each of {total} releases", *caveats(snapshot, batch)])


def _captured(
    snapshot: Snapshot, options: AttackOptions, count: int, batch: int, on_progress: OnProgress
) -> Iterator[Interception]:
    total = number(snapshot, count, options.knows)
    for i, seen in enumerate(interceptions(snapshot, options, count, batch), 1):
        on_progress(i, total, f"release {i}")
        yield seen


def _auxiliary(snapshot: Snapshot, known: Tensor | None, options: AttackOptions) -> Tensor:
    if known is not None:
        return known
    return snapshot.bounds.inputs(torch.rand((256, *snapshot.bounds.shape), generator=options.generator()))


def label_reconstruction(kind: str, snapshot: Snapshot, options: AttackOptions, on_progress: OnProgress) -> AttackOutcome:
    """Labels of single examples: read off their upload, and, for comparison, asked of the model."""
    options.settings_of(kind, {})
    single_uploads(kind, snapshot, options)
    count = options.images or 100
    captured = list(_captured(snapshot, options, count, 1, on_progress))
    uploads, naive = [seen.upload for seen in captured], replace(captured[-1].known, noise_std=None, mask=None)
    labels = torch.cat([seen.y for seen in captured])
    gradient = single.from_gradients(uploads, labels, *snapshot.model, naive)
    output = single.from_outputs(torch.cat([seen.x for seen in captured]), labels, *snapshot.model)
    ratios = [upload.noise_ratio for upload in uploads]
    figures = {
        "rule 'gradient' (reads the upload)": f"{gradient.accuracy:.1%} of {count}",
        "rule 'output' (asks the model)": f"{output.accuracy:.1%}",
        "floor: constant guess": f"{gradient.constant_guess:.1%}",
        "r = |noise| / |signal|": middle(ratios),
    }
    record = {"gradient": asdict(gradient), "output": asdict(output), "noise_ratio": ratios}
    words = [
        "one example behind each upload; rule 'gradient' takes the most negative entry of its last bias, whatever else is known",
        "rule 'output' follows the model's accuracy and says nothing about an upload",
    ]
    return AttackOutcome(figures, record, [*words, *caveats(snapshot, 1)])


# --- clients --------------------------------------------------------------------------------------------------------------


def identification(kind: str, snapshot: Snapshot, options: AttackOptions, on_progress: OnProgress) -> AttackOutcome:
    """Which of the intercepted uploads came from which of the targets, of whom the attacker holds probe images."""
    settings = options.settings_of(kind, {"rule": "gradient", "targets": 10, "probes": 10, "tv": 1e-3})
    single_uploads(kind, snapshot, options)
    unused = [f"--{name}" for name in ("steps", "restarts") if getattr(options, name) is not None]
    unused += ["--set attack.tv"] if "tv" in options.settings else []
    if settings["rule"] == "gradient" and unused:
        raise ConfigError(f"rule gradient inverts nothing and takes no {unused[0]}: leave it out, or --set attack.rule=inversion")
    whole, clients = options.examples == "all", len(snapshot.federation.context.clients)
    count = options.images or (clients if whole else min(100, clients))
    if count < 2:
        raise ConfigError("identification tells uploads apart: give --images of at least 2, and as many clients")
    captured = list(_captured(snapshot, options, count, options.batch or 50, on_progress))
    uploads, known, targets = [seen.upload for seen in captured], captured[-1].known, min(settings["targets"], len(captured))
    probes = [(seen.x[: settings["probes"]], seen.y[: settings["probes"]]) for seen in captured[:targets]]
    if settings["rule"] == "gradient":
        scores = ids.gradient_scores(uploads, probes, *snapshot.model, known)
    else:
        ig, rng = IG(steps=options.steps or 200, restarts=options.restarts or 1, tv=settings["tv"]), options.generator()
        steps, done = ig.steps * ig.restarts * len(uploads), [0]

        def on_step(_: object) -> None:
            done[0] += 1
            on_progress(done[0], steps, "inverting")

        one = replace(known, n=1, local=replace(known.local, batch=None) if known.local else None)
        images = (ig.run([upload], *snapshot.model, one, snapshot.bounds, rng, on_step).x for upload in uploads)
        scores = ids.inversion_scores(read(uploads[:1], *snapshot.model, one)[0].module, probes, images)
    result = ids.identify(scores, range(targets), settings["rule"], seed=options.seed)
    figures = {
        "matched (one upload a target)": f"{result.matched:.0%} of {targets} targets, chance {result.chance_matched:.1%}",
        f"own upload among the {result.flagged} best": f"{result.top:.0%}, chance {result.chance_top:.0%}",
        "true pairs found at 1 % false alarms": f"{result.tpr:.0%}",
        "r = |noise| / |signal|": middle([u.noise_ratio for u in uploads]),
    }
    record = {**asdict(result), "noise_ratio": [u.noise_ratio for u in uploads]}
    batch = max(len(seen.y) for seen in captured)
    behind = "all examples of a client" if whole else f"{batch} examples"
    words = [
        f"{len(uploads)} uploads of {behind} each; "
        f"the attacker holds {settings['probes']} of the training examples of each target",
        f"matching rule '{settings['rule']}', Hungarian assignment",
    ]
    return AttackOutcome(figures, record, [*words, *caveats(snapshot, batch)])


def middle(ratios: Sequence[float | None]) -> str:
    """The median of the noise ratios that are known."""
    known = [r for r in ratios if r is not None]
    return f"{np.median(known):.3g} (median)" if known else "unknown"


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
