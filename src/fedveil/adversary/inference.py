"""Inference attacks on what the door let out: labels, label-reconstruction, identification."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.adversary.attack_options import Options, Outcome, Tell, taken
from fedveil.adversary.attacked_client import Victim
from fedveil.adversary.attacked_release import interceptions, number
from fedveil.adversary.attacker_knowledge import caveats
from fedveil.attacks import identification as ids
from fedveil.attacks import label_reconstruction as single
from fedveil.attacks.inverting import IG
from fedveil.attacks.labels import counted, label_counts
from fedveil.attacks.matching import read
from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fedveil.adversary.snapshot import Scene


def single_uploads(kind: str, scene: Scene, options: Options) -> None:
    """Refuse to attack single uploads where none is visible."""
    if scene.summed and "others" not in options.knows:
        view = scene.federation.setting.scope.view
        leaves = "a sum" if view == "aggregate" else "the last model"
        raise ConfigError(
            f"attack {kind} reads single uploads, but in the {view} view only {leaves} leaves: "
            "no single upload is visible. Set privacy.view = 'server' to attack what the server receives, --knows others "
            "for an adversary who knows every other contribution to the sum, or compare with --defence none"
        )


# --- labels --------------------------------------------------------------------------------------------------------------


def labels(kind: str, scene: Scene, options: Options, tell: Tell) -> Outcome:
    """How many examples of each class are behind a release, from the gradient of the last bias."""
    taken(kind, options, {})
    batch = options.batch or 32
    count = -(-(options.images or 10 * batch) // batch)
    total = number(scene, count, options.knows)
    exact, hit, guessed, n, ratios = 0, 0, 0, 0, []
    for i, seen in enumerate(interceptions(scene, count, batch, options.knows, options.seed)):
        target = read([seen.upload], scene.make_model, scene.state, seen.known)[0]
        counts = counted(target, _auxiliary(scene, seen.known.aux_inputs, options.seed), len(seen.y))
        truth = seen.y.bincount(minlength=len(counts))
        exact += int(torch.equal(counts, truth))
        hit += int(torch.minimum(counts, truth).sum())
        alike = label_counts(torch.zeros(len(counts)), torch.full((len(counts),), 1 / len(counts)), len(seen.y))
        guessed += int(torch.minimum(alike, truth).sum())
        n += len(seen.y)
        ratios.append(seen.upload.noise_ratio)
        tell(i + 1, total, f"release {i + 1}")
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
    return Outcome(figures, record, [f"{n // total} examples behind each of {total} releases", *caveats(scene, batch)])


def _auxiliary(scene: Scene, given: Tensor | None, seed: int) -> Tensor:
    if given is not None:
        return given
    rng = torch.Generator().manual_seed(seed)
    return scene.bounds.inputs(torch.rand((256, *scene.bounds.shape), generator=rng))


def label_reconstruction(kind: str, scene: Scene, options: Options, tell: Tell) -> Outcome:
    """Labels of single examples: read off their upload, and, for comparison, asked of the model."""
    taken(kind, options, {})
    single_uploads(kind, scene, options)
    count = options.images or 100
    uploads, truth, x, known, ratios = [], [], [], None, []
    for i, seen in enumerate(interceptions(scene, count, 1, options.knows, options.seed)):
        uploads.append(seen.upload)
        truth.append(seen.y)
        x.append(seen.x)
        known = seen.known
        ratios.append(seen.upload.noise_ratio)
        tell(i + 1, count, f"upload {i + 1}")
    assert known is not None
    right, answers = torch.cat(truth), torch.cat(x)
    gradient = single.from_gradients(uploads, right, scene.make_model, scene.state, replace(known, noise_std=None, mask=None))
    output = single.from_outputs(answers, right, scene.make_model, scene.state)
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
    return Outcome(figures, record, [*words, *caveats(scene, 1)])


# --- clients --------------------------------------------------------------------------------------------------------------


def identification(kind: str, scene: Scene, options: Options, tell: Tell) -> Outcome:
    """Which of the intercepted uploads came from which of the targets, of whom the attacker holds probe images."""
    given = taken(kind, options, {"rule": "gradient", "targets": 10, "probes": 10, "tv": 1e-3})
    single_uploads(kind, scene, options)
    unused = [f"--{name}" for name in ("steps", "restarts") if getattr(options, name) is not None]
    unused += ["--set attack.tv"] if "tv" in options.settings else []
    if given["rule"] == "gradient" and unused:
        raise ConfigError(f"rule gradient inverts nothing and takes no {unused[0]}: leave it out, or --set attack.rule=inversion")
    batch = options.batch or 50
    count = options.images or min(100, len(scene.federation.context.clients))
    if count < 2:
        raise ConfigError("identification tells uploads apart: give --images of at least 2, and as many clients")
    targets, uploads, probes, known = min(given["targets"], count), [], [], None
    for i, seen in enumerate(interceptions(scene, count, batch, options.knows, options.seed)):
        uploads.append(seen.upload)
        known = seen.known
        if i < targets:
            victim: Victim = seen.victims[0]
            probes.append((victim.x[: given["probes"]], victim.y[: given["probes"]]))
        tell(i + 1, count, f"upload {i + 1}")
    assert known is not None
    if given["rule"] == "gradient":
        scores = ids.gradient_scores(uploads, probes, scene.make_model, scene.state, known)
    else:
        config, rng = IG(steps=options.steps or 200, restarts=options.restarts or 1, tv=given["tv"]), _rng(options.seed)
        steps, done = config.steps * config.restarts * count, [0]

        def on_step(_: object) -> None:
            done[0] += 1
            tell(done[0], steps, "inverting")

        one = replace(known, n=1, local=replace(known.local, batch=None) if known.local else None)
        scores = ids.inversion_scores(uploads, probes, scene.make_model, scene.state, one, scene.bounds, config, rng, on_step)
    result = ids.identify(scores, range(targets), given["rule"], seed=options.seed)
    figures = {
        "matched (one upload a target)": f"{result.matched:.0%} of {targets} targets, chance {result.chance_matched:.1%}",
        f"own upload among the {result.flagged} best": f"{result.top:.0%}, chance {result.chance_top:.0%}",
        "true pairs found at 1 % false alarms": f"{result.tpr:.0%}",
        "r = |noise| / |signal|": middle([u.noise_ratio for u in uploads]),
    }
    record = {**asdict(result), "noise_ratio": [u.noise_ratio for u in uploads]}
    words = [
        f"{count} uploads of {batch} examples each; the attacker holds {given['probes']} of the training examples of each target",
        f"matching rule '{given['rule']}', Hungarian assignment",
    ]
    return Outcome(figures, record, [*words, *caveats(scene, batch)])


def middle(ratios: Sequence[float | None]) -> str:
    """The median of the noise ratios that are known."""
    known = [r for r in ratios if r is not None]
    return f"{np.median(known):.3g} (median)" if known else "unknown"


def _rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
