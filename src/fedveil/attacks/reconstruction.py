"""The reconstruction attacks: DLG and iDLG, Inverting Gradients, GradInversion, and one against rotated gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.attacks import labels
from fedveil.attacks.attack_options import Attack, AttackOptions, AttackOutcome, Examples, OnProgress, setting
from fedveil.attacks.attack_types import AttackStep, Bounds, CapturedUpload, Knowledge, ModelFn, OnStep, Reconstruction, Trial
from fedveil.attacks.interception import Interception, caveats, interceptions, number, single_uploads
from fedveil.attacks.labels import unique_labels
from fedveil.attacks.matching import (
    BATCH_NORMS,
    LineSearch,
    Report,
    Target,
    adam,
    averaged,
    cosine,
    lbfgs,
    mean_power,
    read,
    split,
    squared,
)
from fedveil.attacks.metrics import floors, matched, score
from fedveil.errors import ConfigError
from fedveil.training.params import trained_parameters

if TYPE_CHECKING:
    from fedveil.attacks.snapshot import Snapshot


@dataclass(frozen=True)
class Attempt:
    """A running attack. targets: the uploads as gradients. n: examples to reconstruct. started: clock at the start (s)."""

    uploads: Sequence[CapturedUpload]
    targets: Sequence[Target]
    n: int
    knowledge: Knowledge
    bounds: Bounds
    rng: torch.Generator
    on_step: OnStep | None
    started: float = field(default_factory=time.perf_counter)

    def gaussian(self, *shape: int) -> Tensor:
        """Draw a starting point from N(0, 1), (*shape, *example), to be optimised."""
        return torch.randn((*shape, *self.bounds.shape), generator=self.rng).requires_grad_(True)

    def labels(self) -> Tensor:
        """Return the known labels, or the labels inferred from the first upload."""
        return labels.infer(self.targets[0], self.n, self.knowledge, self.bounds, self.rng)

    def reporter(self, name: str, trial: int, trials: int, steps: int) -> Report:
        """Return a callback that reports the steps of one start to the caller."""
        on_step = self.on_step
        if on_step is None:
            return lambda step, loss: None
        return lambda step, loss: on_step(AttackStep(name, trial, trials, step, steps, loss))

    def conclude(self, attack: GradientMatching, trials: Sequence[Trial]) -> Reconstruction:
        """Return the trial with the smallest matching loss; a loss that is not finite counts as infinite."""
        if not trials:
            raise ConfigError("an attack needs at least one start; set restarts >= 1")
        losses = tuple(t.loss if math.isfinite(t.loss) else math.inf for t in trials)
        chosen = min(range(len(trials)), key=losses.__getitem__)
        best = trials[chosen]
        return Reconstruction(
            attack=attack.name,
            x=best.x.detach(),
            images=self.bounds.images(best.x),
            y=best.y,
            trial_losses=losses,
            chosen=chosen,
            steps=sum(t.steps for t in trials),
            closures=sum(t.closures for t in trials),
            seconds=time.perf_counter() - self.started,
            stop_reason=best.stop_reason,
            knowledge=self.knowledge.names,
            adaptive=self.knowledge.adaptive,
            seed=self.rng.initial_seed(),
            noise_ratio=self.uploads[0].noise_ratio,
            settings={f.name: getattr(attack, f.name) for f in fields(attack)},
        )


@dataclass(frozen=True)
class GradientMatching(Attack):
    """A reconstruction attack: search for examples whose gradient equals that of the upload.

    starts: the name of the setting that `AttackOptions.restarts` sets.
    """

    takes: ClassVar[tuple[str, ...]] = ("batch", "restarts", "steps", "knows", "defence")
    examples: ClassVar[tuple[Examples, ...]] = ("test",)
    starts: ClassVar[str] = "restarts"

    @classmethod
    def settings(cls, options: AttackOptions) -> dict[str, Any]:
        """Return the settings that a user's options give, steps and restarts among them."""
        own = {"steps": options.steps, cls.starts: options.restarts}
        return {**options.settings, **{name: value for name, value in own.items() if value is not None}}

    def trials(self, attempt: Attempt) -> list[Trial]:
        """Return one candidate for each start."""
        raise NotImplementedError

    def run(
        self,
        uploads: Sequence[CapturedUpload],
        model_fn: ModelFn,
        state: Mapping[str, Tensor],
        knowledge: Knowledge,
        bounds: Bounds,
        rng: torch.Generator,
        on_step: OnStep | None = None,
    ) -> Reconstruction:
        """Reconstruct the examples behind `uploads`, all of the same examples at the model `state`."""
        targets, n = read(uploads, model_fn, state, knowledge), examples(uploads, knowledge)
        attempt = Attempt(uploads, targets, n, knowledge, bounds, rng, on_step)
        return attempt.conclude(self, self.trials(attempt))

    def on(self, snapshot: Snapshot, options: AttackOptions, on_progress: OnProgress) -> AttackOutcome:
        """Reconstruct images from each intercepted release, and score them against the truth and the floors."""
        batch = options.batch or 1
        if options.examples == "test":
            single_uploads(self.name, snapshot, options)
        count = -(-(options.images or 4 * batch) // batch)
        total = number(snapshot, count, options.knows)
        pairs: list[tuple[Interception, Reconstruction]] = []
        for i, seen in enumerate(interceptions(snapshot, options, count, batch)):
            rng, on_step = options.generator(i), _counted(on_progress, i, total)
            pairs.append((seen, self.run([seen.upload], *snapshot.model, seen.known, snapshot.bounds, rng, on_step)))
        return _judged(self.name, snapshot, options, batch, pairs)


def examples(uploads: Sequence[CapturedUpload], knowledge: Knowledge) -> int:
    """Return the number of examples to reconstruct: as the attacker knows it, else as the upload states it."""
    if knowledge.n is not None:
        return knowledge.n
    return len(knowledge.labels) if knowledge.labels is not None else uploads[0].n_examples


@dataclass(frozen=True)
class DLG(GradientMatching):
    """Minimise the squared distance of gradients jointly over the examples and their soft labels, by L-BFGS, without bounds.

    steps: outer steps of 20 inner ones. restarts: starts from N(0, 1); none follows a start whose distance is
    below `tolerance` times the squared norm of the received gradient (1e-9 is near the resolution of float32).
    line_search: None is the published optimizer; strong Wolfe succeeds more often.
    Labels are known if `Knowledge.labels` is given. Fails on ReLU networks, whose gradients are not smooth in the input.
    """

    name: ClassVar[str] = "dlg"
    steps: int = setting(300, least=1)
    restarts: int = setting(4, least=1)
    tolerance: float = setting(1e-9, least=0)
    line_search: LineSearch = setting("strong_wolfe", choices=("strong_wolfe", None))

    def labels(self, attempt: Attempt) -> Tensor | None:
        """Return the known labels, or None: then the labels are optimised too."""
        return None if attempt.knowledge.labels is None else attempt.labels()

    def trials(self, attempt: Attempt) -> list[Trial]:
        """Return one candidate for each start, until one is below the tolerance.

        L-BFGS stops at absolute changes, so a gradient of norm below 1 (after clipping) is divided by its norm.
        """
        fixed, power, trials = self.labels(attempt), float(mean_power(attempt.targets)), list[Trial]()
        tolerance, scale = self.tolerance * max(power, 1.0), 1 / min(max(power, 1e-30), 1.0)
        for trial in range(self.restarts):
            if trials and trials[-1].loss * scale < tolerance:
                break
            variables = [attempt.gaussian(attempt.n)]
            if fixed is None:
                classes = attempt.targets[0].module(variables[0][:1].detach()).shape[1]
                variables.append(torch.randn((attempt.n, classes), generator=attempt.rng).requires_grad_(True))

            def loss(variables: Sequence[Tensor] = variables) -> Tensor:
                y = fixed if fixed is not None else variables[1].softmax(1)
                return scale * averaged(squared, attempt.targets, variables[0], y)

            report = attempt.reporter(self.name, trial, self.restarts, self.steps)
            values, reached, steps, closures, reason = lbfgs(loss, variables, self.steps, tolerance, self.line_search, report)
            y = fixed if fixed is not None else values[1].argmax(1)
            trials.append(Trial(values[0], y, reached / scale, steps, closures, reason))
        return trials


@dataclass(frozen=True)
class IDLG(DLG):
    """DLG with fixed labels: known, or inferred from the last layer (one example: the most negative bias gradient).

    Fields as in `DLG`; the public implementation stops at an absolute 1e-6, without line search, from one start.
    """

    name: ClassVar[str] = "idlg"

    def labels(self, attempt: Attempt) -> Tensor:
        """Return the known labels, or the labels inferred from the upload."""
        return attempt.labels()


def total_variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbours, horizontal plus vertical (last two dimensions), or along a signal."""
    variation = (x[..., 1:] - x[..., :-1]).abs().mean()
    return variation + (x[..., 1:, :] - x[..., :-1, :]).abs().mean() if x.ndim == 4 else variation


@dataclass(frozen=True)
class IG(GradientMatching):
    """Minimise 1 - cosine similarity of gradients + tv * total variation, by Adam on signed gradients within the bounds.

    steps: 4,800 by default, 24,000 in the published script. lr falls tenfold at 3/8, 5/8 and 7/8 of the steps.
    tv: weight >= 0; published values run from 1e-6 to 1e-1. restarts: starts from N(0, 1), ranked by the cosine distance alone.
    """

    name: ClassVar[str] = "ig"
    steps: int = setting(4800, least=1)
    restarts: int = setting(1, least=1)
    lr: float = setting(0.1, above=0)
    tv: float = setting(1e-3, least=0)

    def trials(self, attempt: Attempt) -> list[Trial]:
        y = attempt.labels()
        return [self._trial(attempt, y, trial) for trial in range(self.restarts)]

    def _trial(self, attempt: Attempt, y: Tensor, trial: int) -> Trial:
        x, targets = attempt.gaussian(attempt.n), attempt.targets

        def loss() -> Tensor:
            return averaged(self._distance, targets, x, y) + (self.tv * total_variation(x) if self.tv else 0.0)

        report = attempt.reporter(self.name, trial, self.restarts, self.steps)
        rates = [self._rate(step) for step in range(self.steps)]
        steps, reason = adam(loss, x, rates, attempt.bounds, report, signed=True)
        return Trial(x.detach(), y, float(averaged(self._distance, targets, x, y).detach()), steps, steps + 1, reason)

    def _distance(self, target: Target, candidate: Tensor) -> Tensor:
        return cosine(target, candidate)

    def _rate(self, step: int) -> float:
        return self.lr * 0.1 ** sum(8 * step >= k * self.steps for k in (3, 5, 7))


@dataclass(frozen=True)
class GradInversion(GradientMatching):
    """Adam from several starts at once on matching + total variation + L2 + batch-norm statistics + distance to their mean.

    steps: 20,000 published; seeds: joint starts, 8 published. lr warms up over `warmup` steps and falls along a cosine.
    langevin: noise per step in units of the rate (0.2 published, 0.01 in a public implementation).
    matching, tv, l2, bn, group: weights >= 0 of the terms; the first batch normalisation counts ten times. The
    published weight of `matching` is 1e-4, for large networks; on small ones its gradient would not outweigh the priors'.
    A gradient of norm below 1 (after clipping) is divided by its norm, for the same reason.
    unique: labels are the classes of smallest min_j dW[c, j] (no label twice); else label counts.
    The group term uses the pixel mean of the starts, without registration. Starts are ranked by the matching term alone.
    """

    name: ClassVar[str] = "gradinversion"
    starts: ClassVar[str] = "seeds"
    steps: int = setting(2000, least=1)
    seeds: int = setting(4, least=1)
    lr: float = setting(0.1, above=0)
    warmup: int = setting(50, least=0)
    langevin: float = setting(0.01, least=0)
    matching: float = setting(1.0, least=0)
    tv: float = setting(1e-4, least=0)
    l2: float = setting(1e-6, least=0)
    bn: float = setting(0.1, least=0)
    group: float = setting(0.01, least=0)
    unique: bool = False

    def trials(self, attempt: Attempt) -> list[Trial]:
        guessed = self.unique and attempt.knowledge.labels is None
        y = unique_labels(attempt.targets[0], attempt.n) if guessed else attempt.labels()
        x, targets = attempt.gaussian(self.seeds, attempt.n), attempt.targets

        def noise(step: int) -> Tensor:
            return self.langevin * torch.randn(x.shape, generator=attempt.rng)

        def loss() -> Tensor:
            return torch.stack([self._objective(targets, start, y) for start in x]).sum() + self.group * disagreement(x)

        report, langevin = attempt.reporter(self.name, 0, 1, self.steps), noise if self.langevin else None
        rates = [self._rate(step) for step in range(self.steps)]
        steps, reason = adam(loss, x, rates, attempt.bounds, report, signed=False, langevin=langevin)
        losses = [float(averaged(squared, targets, start, y).detach()) for start in x]
        return [Trial(x[i].detach(), y, losses[i], steps, steps + 1, reason) for i in range(self.seeds)]

    def _objective(self, targets: Sequence[Target], x: Tensor, y: Tensor) -> Tensor:
        match, power = averaged(squared, targets, x, y), mean_power(targets).clamp(1e-30, 1.0)
        priors = self.tv * total_variation(x) + self.l2 * (x.square().sum() + 1e-12).sqrt()
        return self.matching * match / power + priors + self.bn * statistics_distance(targets[0].module, x)

    def _rate(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(self.steps - self.warmup, 1)))


def disagreement(x: Tensor) -> Tensor:
    """Return the sum over the starts of the distance between a start and the pixel mean of all. x: (seeds, n, *shape)."""
    difference = x - x.mean(0, keepdim=True)
    return (difference.flatten(1).square().sum(1) + 1e-12).sqrt().sum()


def statistics_distance(module: nn.Module, x: Tensor) -> Tensor:
    """Return the sum over batch normalisations of |mean - running mean| + |variance - running variance|, the first ten times.

    0 if the model has none, or if their statistics are not known (`CapturedUpload.bn_mode` "train").
    """
    layers = [m for m in module.modules() if isinstance(m, BATCH_NORMS) and m.running_mean is not None]
    if not layers:
        return torch.zeros(())
    inputs: list[Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda _, positional: inputs.append(positional[0])) for m in layers]
    try:
        module(x)
    finally:
        for hook in hooks:
            hook.remove()
    total = torch.zeros(())
    for i, (layer, entering) in enumerate(zip(layers, inputs, strict=True)):
        channels = entering.transpose(0, 1).flatten(1)
        mean, variance = layer.running_mean, layer.running_var
        assert mean is not None
        assert variance is not None
        distance = (channels.mean(1) - mean).norm() + (channels.var(1, unbiased=False) - variance).norm()
        total = total + (10 if i == 0 else 1) * distance
    return total


@dataclass(frozen=True)
class Subspace(IG):
    """IG for rotated gradients: candidates match the received norm of each layer, and are orthogonal to the received gradient.

    Such an upload does not show the labels: unless they are known, they are inferred from the rest of the last bias.
    aligned: instead, candidates are parallel to the received gradient, up to the sign; a projection that divides by the norm
    once (instead of twice) leaves large gradients this way. Other fields as in `IG`.
    """

    name: ClassVar[str] = "subspace"
    aligned: bool = False

    def _distance(self, target: Target, candidate: Tensor) -> Tensor:
        return constraint(target.named(), split(candidate, trained_parameters(target.module)), aligned=self.aligned)


def constraint(received: dict[str, Tensor], candidate: dict[str, Tensor], *, aligned: bool) -> Tensor:
    """Return the layers' mean of log(|candidate| / |received|)^2 + cos^2, or 1 - |cos| if `aligned`; zeros do not count."""
    terms = []
    for name, o in received.items():
        if not bool(o.any()):
            continue
        g = candidate[name]
        size, norm = (g.square().sum() + 1e-30).sqrt(), o.norm()
        cosine = (g * o).sum() / (size * norm)
        terms.append((size / norm).log().square() + (1 - cosine.abs() if aligned else cosine.square()))
    return torch.stack(terms).mean()


# --- scores -------------------------------------------------------------------------------------------------------------------

_REFERENCE = 1000


def _counted(on_progress: OnProgress, done: int, count: int) -> OnStep:
    """Return a callback that counts the steps of all releases together, each with the same largest number."""

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
    seen_nothing = floors(truth, bounds.images(snapshot.federation.test[0][:_REFERENCE]), options.seed % 2**31)
    labels = sum(_in_common(r.y, seen.y, snapshot.info.classes) for seen, r in pairs) / len(truth)
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
    words = [_description_of_releases(pairs[0][0], batch), _effort(found[0]), *caveats(snapshot, batch)]
    if truth.ndim != 4 or truth.shape[1] not in (1, 3):
        return AttackOutcome(figures, record, words)
    return AttackOutcome(figures, record, words, truth[:10], [(kind, ordered[:10])])


def _in_common(a: Tensor, b: Tensor, classes: int) -> int:
    """Return the number of labels that two collections share, in any order."""
    return int(torch.minimum(a.bincount(minlength=classes), b.bincount(minlength=classes)).sum())


def distinct_ratios(ratios: Sequence[float | None]) -> str:
    """Return the distinct noise ratios, to three digits."""
    known = sorted({float(f"{r:.3g}") for r in ratios if r is not None})
    return ", ".join([f"{r:.3g}" for r in known] + ["unknown"] * (None in ratios))


def _description_of_releases(seen: Interception, batch: int) -> str:
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
