"""Inference attacks on what the door let out: labels, label-reconstruction, identification."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.adversary.attack_options import AttackOptions, AttackOutcome, OnProgress
from fedveil.adversary.attacked_release import interceptions, number, single_uploads
from fedveil.adversary.attacker_knowledge import Interception, caveats
from fedveil.attacks import identification as ids
from fedveil.attacks import label_reconstruction as single
from fedveil.attacks.inverting import IG
from fedveil.attacks.labels import counted, label_counts
from fedveil.attacks.matching import read
from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from fedveil.adversary.snapshot import Snapshot


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
