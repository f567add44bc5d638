"""What every reconstruction attack shares: it reads the uploads, reports its steps, and keeps the best of its starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
from torch import Tensor

from fedveil.attacks import labels
from fedveil.attacks.attack_types import AttackStep, Bounds, CapturedUpload, Knowledge, ModelFn, OnStep, Reconstruction, Trial
from fedveil.attacks.matching import Target, read
from fedveil.errors import ConfigError

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
