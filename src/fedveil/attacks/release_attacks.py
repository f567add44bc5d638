"""Attacks on an intercepted release: inference of labels and senders."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from fedveil.attacks import labels as readings
from fedveil.attacks.attack_options import Attack, AttackOptions, AttackOutcome, Examples, OnProgress, setting
from fedveil.attacks.interception import Interception, caveats, interceptions, number, single_uploads
from fedveil.attacks.matching import read
from fedveil.attacks.reconstruction import IG
from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from fedveil.attacks.snapshot import Snapshot


# --- labels --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelCounts(Attack):
    """Infer the number of examples of each class in a release from the gradient of the last bias."""

    name: ClassVar[str] = "labels"
    takes: ClassVar[tuple[str, ...]] = ("batch", "knows", "defence")

    def on(self, snapshot: Snapshot, options: AttackOptions, on_progress: OnProgress) -> AttackOutcome:
        batch = options.batch or min(32, snapshot.federation.setting.records or 32)
        count = -(-(options.images or 10 * batch) // batch)
        exact, hit, guessed, n, ratios = 0, 0, 0, 0, []
        for seen in _captured(snapshot, options, count, batch, on_progress):
            target = read([seen.upload], *snapshot.model, seen.known)[0]
            counts = readings.counted(target, _auxiliary(snapshot, seen.known.aux_inputs, options), len(seen.y))
            truth = seen.y.bincount(minlength=len(counts))
            exact += int(torch.equal(counts, truth))
            hit += int(torch.minimum(counts, truth).sum())
            alike = readings.label_counts(torch.zeros(len(counts)), torch.full((len(counts),), 1 / len(counts)), len(seen.y))
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
        return AttackOutcome(
            figures, record, [f"{n // total} examples behind each of {total} releases", *caveats(snapshot, batch)]
        )


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


@dataclass(frozen=True)
class SingleLabels(Attack):
    """Infer labels of single examples from their upload and, for comparison, from the output of the model."""

    name: ClassVar[str] = "label-reconstruction"
    takes: ClassVar[tuple[str, ...]] = ("knows", "defence")
    examples: ClassVar[tuple[Examples, ...]] = ("test",)

    def on(self, snapshot: Snapshot, options: AttackOptions, on_progress: OnProgress) -> AttackOutcome:
        single_uploads(self.name, snapshot, options)
        count = options.images or 100
        captured = list(_captured(snapshot, options, count, 1, on_progress))
        uploads, naive = [seen.upload for seen in captured], replace(captured[-1].known, noise_std=None, mask=None)
        labels = torch.cat([seen.y for seen in captured])
        gradient = readings.from_gradients(uploads, labels, *snapshot.model, naive)
        output = readings.from_outputs(torch.cat([seen.x for seen in captured]), labels, *snapshot.model)
        ratios = [upload.noise_ratio for upload in uploads]
        figures = {
            "rule 'gradient' (reads the upload)": f"{gradient.accuracy:.1%} of {count}",
            "rule 'output' (asks the model)": f"{output.accuracy:.1%}",
            "floor: constant guess": f"{gradient.constant_guess:.1%}",
            "r = |noise| / |signal|": middle(ratios),
        }
        record = {"gradient": asdict(gradient), "output": asdict(output), "noise_ratio": ratios}
        words = [
            "one example behind each upload; rule 'gradient' takes the most negative entry of its last bias, "
            "whatever else is known",
            "rule 'output' follows the model's accuracy and says nothing about an upload",
        ]
        return AttackOutcome(figures, record, [*words, *caveats(snapshot, 1)])


# --- clients --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Senders(Attack):
    """Match intercepted uploads to target clients, of whom the attacker holds probe images."""

    name: ClassVar[str] = "identification"
    takes: ClassVar[tuple[str, ...]] = ("batch", "restarts", "steps", "knows", "defence")
    examples: ClassVar[tuple[Examples, ...]] = ("all",)
    rule: readings.Rule = setting("gradient", choices=("gradient", "inversion"))
    targets: int = setting(10, least=1)
    probes: int = setting(10, least=1)
    tv: float = setting(1e-3, least=0)

    def on(self, snapshot: Snapshot, options: AttackOptions, on_progress: OnProgress) -> AttackOutcome:
        single_uploads(self.name, snapshot, options)
        unused = [f"--{name}" for name in ("steps", "restarts") if getattr(options, name) is not None]
        unused += ["--set attack.tv"] if "tv" in options.settings else []
        if self.rule == "gradient" and unused:
            raise ConfigError(
                f"rule gradient inverts nothing and takes no {unused[0]}: leave it out, or --set attack.rule=inversion"
            )
        whole, clients = options.examples == "all", len(snapshot.federation.context.clients)
        count = options.images or (clients if whole else min(100, clients))
        if count < 2:
            raise ConfigError("identification tells uploads apart: give --images of at least 2, and as many clients")
        captured = list(_captured(snapshot, options, count, options.batch or 50, on_progress))
        uploads, known, targets = [seen.upload for seen in captured], captured[-1].known, min(self.targets, len(captured))
        probes = [(seen.x[: self.probes], seen.y[: self.probes]) for seen in captured[:targets]]
        if self.rule == "gradient":
            scores = readings.gradient_scores(uploads, probes, *snapshot.model, known)
        else:
            ig, rng = IG(steps=options.steps or 200, restarts=options.restarts or 1, tv=self.tv), options.generator()
            steps, done = ig.steps * ig.restarts * len(uploads), [0]

            def on_step(_: object) -> None:
                done[0] += 1
                on_progress(done[0], steps, "inverting")

            one = replace(known, n=1, local=replace(known.local, batch=None) if known.local else None)
            images = (ig.run([upload], *snapshot.model, one, snapshot.bounds, rng, on_step).x for upload in uploads)
            scores = readings.inversion_scores(read(uploads[:1], *snapshot.model, one)[0].module, probes, images)
        result = readings.identify(scores, range(targets), self.rule, seed=options.seed)
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
            f"{len(uploads)} uploads of {behind} each; the attacker holds {self.probes} of the training examples of each target",
            f"matching rule '{self.rule}', Hungarian assignment",
        ]
        return AttackOutcome(figures, record, [*words, *caveats(snapshot, batch)])


def middle(ratios: Sequence[float | None]) -> str:
    """Return the median of the known noise ratios."""
    known = [r for r in ratios if r is not None]
    return f"{np.median(known):.3g} (median)" if known else "unknown"
