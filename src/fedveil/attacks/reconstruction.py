"""The reconstruction attacks: DLG and iDLG, Inverting Gradients, GradInversion, and one against rotated gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedveil.attacks import labels
from fedveil.attacks.attack_types import AttackStep, Bounds, CapturedUpload, Knowledge, ModelFn, OnStep, Reconstruction, Trial
from fedveil.attacks.labels import unique_labels
from fedveil.attacks.matching import BATCH_NORMS, Target, averaged, cosine, mean_power, read, split, squared
from fedveil.errors import ConfigError
from fedveil.training.params import trained_parameters

Report = Callable[[int, float], None]


@dataclass(frozen=True)
class Attempt:
    """One attack under way. targets: the uploads as gradients. n: examples to reconstruct. started: clock at the start, s."""

    uploads: Sequence[CapturedUpload]
    targets: Sequence[Target]
    n: int
    knowledge: Knowledge
    bounds: Bounds
    rng: torch.Generator
    on_step: OnStep | None
    started: float = field(default_factory=time.perf_counter)

    def gaussian(self, *shape: int) -> Tensor:
        """A start from N(0, 1), (*shape, *example), that is to be optimised."""
        return torch.randn((*shape, *self.bounds.shape), generator=self.rng).requires_grad_(True)

    def labels(self) -> Tensor:
        """The labels that are known, or those read off the first upload."""
        return labels.infer(self.targets[0], self.n, self.knowledge, self.bounds, self.rng)

    def reporter(self, name: str, trial: int, trials: int, steps: int) -> Report:
        """What tells the caller about the steps of one start."""
        on_step = self.on_step
        if on_step is None:
            return lambda step, loss: None
        return lambda step, loss: on_step(AttackStep(name, trial, trials, step, steps, loss))

    def conclude(self, attack: Attack, trials: Sequence[Trial]) -> Reconstruction:
        """The trial with the smallest matching loss as a result; candidates of a loss that is not finite lose."""
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
class Attack:
    """A reconstruction attack: a frozen configuration that can be run; its fields are its settings."""

    name: ClassVar[str]

    def trials(self, attempt: Attempt) -> list[Trial]:
        """One candidate for each start."""
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


def examples(uploads: Sequence[CapturedUpload], knowledge: Knowledge) -> int:
    """How many examples to reconstruct: what the attacker knows, else what the upload states."""
    if knowledge.n is not None:
        return knowledge.n
    return len(knowledge.labels) if knowledge.labels is not None else uploads[0].n_examples


LineSearch = Literal["strong_wolfe"] | None


def lbfgs(
    loss: Callable[[], Tensor],
    variables: Sequence[Tensor],
    steps: int,
    tolerance: float,
    line_search: LineSearch,
    report: Report,
    stall: int = 5,
) -> tuple[list[Tensor], float, int, int, str]:
    """L-BFGS with rate 1, history 100 and 20 inner iterations per step, from the present values of `variables`.

    Ends below `tolerance`, at a loss that is not finite, or after `stall` steps without change. Returns the best values seen,
    the loss at exactly these values, steps, closures and the reason for stopping.
    """
    optimizer = torch.optim.LBFGS(list(variables), lr=1.0, max_iter=20, history_size=100, line_search_fn=line_search)
    closures = 0

    def closure() -> Tensor:
        nonlocal closures
        closures += 1
        value = loss()
        for variable, grad in zip(variables, torch.autograd.grad(value, list(variables)), strict=True):
            variable.grad = grad
        return value.detach()

    best, best_loss, unchanged, reason, done = [v.detach().clone() for v in variables], math.inf, 0, "steps exhausted", steps
    for step in range(1, steps + 1):
        before = [v.detach().clone() for v in variables]
        value = float(optimizer.step(closure))  # type: ignore[no-untyped-call]
        if value < best_loss:
            best, best_loss = before, value
        report(step, value)
        same = all(torch.equal(b, v.detach()) for b, v in zip(before, variables, strict=True))
        unchanged = unchanged + 1 if same else 0
        ended = {"not finite": not math.isfinite(value), "below tolerance": value < tolerance, "stalled": unchanged >= stall}
        if any(ended.values()):
            reason, done = next(why for why, holds in ended.items() if holds), step
            break
    last = float(closure())
    if last < best_loss:
        best, best_loss = [v.detach().clone() for v in variables], last
    return best, best_loss, done, closures, reason


def adam(
    loss: Callable[[], Tensor],
    x: Tensor,
    rates: Sequence[float],
    bounds: Bounds,
    report: Report,
    signed: bool,
    langevin: Callable[[int], Tensor] | None = None,
) -> tuple[int, str]:
    """Adam on x (changed in place), projected into the box after every step; returns steps done and the reason for stopping.

    rates: the learning rate of each step. signed: use the sign of the gradient. langevin: step -> noise added to x, in units of
    the rate.
    """
    optimizer = torch.optim.Adam([x], lr=rates[0])
    low, high = bounds.edges()
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        value = loss()
        reached = float(value.detach())
        if not math.isfinite(reached):
            return step, "not finite"
        (grad,) = torch.autograd.grad(value, x)
        x.grad = grad.sign() if signed else grad
        optimizer.step()
        with torch.no_grad():
            if langevin is not None:
                x.add_(langevin(step), alpha=rate)
            x.copy_(torch.minimum(torch.maximum(x, low), high))
        report(step + 1, reached)
    return len(rates), "steps exhausted"


@dataclass(frozen=True)
class DLG(Attack):
    """Minimise the squared distance of gradients jointly over the examples and their soft labels, by L-BFGS, without a box.

    steps: outer steps of 20 inner ones. restarts: starts from N(0, 1), ended early by one whose distance is below
    `tolerance` times the squared norm of what was received (1e-9 is near the resolution of float32).
    line_search: None is the published optimizer; strong Wolfe succeeds from more starts.
    Labels are known if `Knowledge.labels` is given. Fails on ReLU networks, whose gradients are not smooth in the input.
    """

    name: ClassVar[str] = "dlg"
    steps: int = 300
    restarts: int = 4
    tolerance: float = 1e-9
    line_search: LineSearch = "strong_wolfe"

    def labels(self, attempt: Attempt) -> Tensor | None:
        """The labels where they are known; else they are variables."""
        return None if attempt.knowledge.labels is None else attempt.labels()

    def trials(self, attempt: Attempt) -> list[Trial]:
        """One candidate for each start, until one is below the tolerance.

        L-BFGS stops at absolute changes, so a gradient of norm below 1 (a clipped one) is matched in units of its own.
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
    """DLG with the labels fixed beforehand: known, or read from the last layer (one example: its most negative bias gradient).

    Fields as in `DLG`; the public implementation stops at an absolute 1e-6, without line search, from one start.
    """

    name: ClassVar[str] = "idlg"

    def labels(self, attempt: Attempt) -> Tensor:
        """The labels that are known, or those read off the upload."""
        return attempt.labels()


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of horizontal neighbours plus that of vertical ones (last two dimensions), or along a signal."""
    variation = (x[..., 1:] - x[..., :-1]).abs().mean()
    return variation + (x[..., 1:, :] - x[..., :-1, :]).abs().mean() if x.ndim == 4 else variation


@dataclass(frozen=True)
class IG(Attack):
    """Minimise 1 - cosine similarity of gradients + tv * total variation, by Adam on signed gradients inside the box.

    steps: 4,800 by default, 24,000 in the published script. lr falls tenfold at 3/8, 5/8 and 7/8 of the steps.
    tv: weight >= 0; published values run from 1e-6 to 1e-1. restarts: starts from N(0, 1), ranked by the cosine distance alone.
    """

    name: ClassVar[str] = "ig"
    steps: int = 4800
    restarts: int = 1
    lr: float = 0.1
    tv: float = 1e-3

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
class GradInversion(Attack):
    """Adam from several starts at once on matching + total variation + L2 + batch-norm statistics + distance to their mean.

    steps: 20,000 published; seeds: joint starts, 8 published. lr warms up over `warmup` steps and falls along a cosine.
    langevin: noise per step in units of the rate (0.2 published, 0.01 in a public implementation).
    matching, tv, l2, bn, group: weights >= 0 of the terms; the first batch normalisation counts ten times. The
    published weight of `matching` is 1e-4, for large networks; on small ones its gradient would not outweigh the priors'.
    A gradient of norm below 1 (a clipped one) is matched in units of its own, for the same reason.
    unique: labels are the classes of smallest min_j dW[c, j] (no label twice); else label counts.
    The group term uses the pixel mean of the starts, without registration. Starts are ranked by the matching term alone.
    """

    name: ClassVar[str] = "gradinversion"
    steps: int = 2000
    seeds: int = 4
    lr: float = 0.1
    warmup: int = 50
    langevin: float = 0.01
    matching: float = 1.0
    tv: float = 1e-4
    l2: float = 1e-6
    bn: float = 0.1
    group: float = 0.01
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
    """Sum over the starts of the distance between a start and the pixel mean of all. x: (seeds, n, *shape)."""
    difference = x - x.mean(0, keepdim=True)
    return (difference.flatten(1).square().sum(1) + 1e-12).sqrt().sum()


def statistics_distance(module: nn.Module, x: Tensor) -> Tensor:
    """Sum over batch normalisations of |mean - running mean| + |variance - running variance|, the first ten times.

    0 where the model has none, or where their statistics are not known (`CapturedUpload.bn_mode` "train").
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
    """IG whose candidates have each layer's received norm, and a gradient orthogonal to what was received.

    Labels cannot be read off such an upload: they come from what is left of the last bias, unless they are known.
    aligned: instead, gradients along what was received, up to the sign, as a projection that divides by the norm once leaves
    large gradients. Other fields as in `IG`.
    """

    name: ClassVar[str] = "subspace"
    aligned: bool = False

    def _distance(self, target: Target, candidate: Tensor) -> Tensor:
        return constraint(target.named(), split(candidate, trained_parameters(target.module)), aligned=self.aligned)


def constraint(received: dict[str, Tensor], candidate: dict[str, Tensor], *, aligned: bool) -> Tensor:
    """Mean over the layers of log(|candidate| / |received|)^2 + cos^2, or 1 - |cos| if `aligned`; zeros do not count."""
    terms = []
    for name, o in received.items():
        if not bool(o.any()):
            continue
        g = candidate[name]
        size, norm = (g.square().sum() + 1e-30).sqrt(), o.norm()
        cosine = (g * o).sum() / (size * norm)
        terms.append((size / norm).log().square() + (1 - cosine.abs() if aligned else cosine.square()))
    return torch.stack(terms).mean()
