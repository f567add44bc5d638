"""Public inputs of a round: the released global models, and what the server computes on the public split."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fedveil.errors import ConfigError, FedveilError
from fedveil.federation.evaluation import global_model
from fedveil.federation.evidence import evidence
from fedveil.mechanism.plan import Released
from fedveil.training.local import BatchGradient, Local, Plain, train

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.federation.progress import Federation, Progress


def released(federation: Federation, progress: Progress) -> Released:
    """Return all that a policy may see before the coming round: a function of past releases, the seed and the public split.

    Raises:
        ConfigError: the policy trains on the public split, and the run has none.
        FedveilError: that training diverged.
    """
    return Released(
        progress.round,
        progress.model,
        progress.previous,
        _public_loss(federation, progress),
        server={} if federation.context.summed else progress.common,
        public_update=_public_update(federation, progress),
    )


def _public_loss(federation: Federation, progress: Progress) -> float | None:
    if federation.public is None:
        return None
    model, task = global_model(federation, progress), federation.context.task
    with torch.no_grad():
        return task.test_loss(*evidence(task, model, *federation.public))


def _public_update(federation: Federation, progress: Progress) -> Tensor | None:
    """Return the change of the global model [d] after the policy's `public_steps` of plain training on the public split."""
    context, t = federation.context, progress.round
    steps: int | None = getattr(context.policy.part, "public_steps", None)
    if steps is None:
        return None
    if steps < 1:
        raise ConfigError(f"a policy's public_steps is at least 1, got {steps}")
    if federation.public is None:
        raise ConfigError(
            f"{federation.method.name} trains on public examples before each round, and there are none: set "
            f"data.public_fraction, such as 0.1"
        )
    x, y = federation.public
    model, draws = global_model(federation, progress), federation.draws
    device = model.vector.device
    local = Local(
        model,
        progress.model.to(device, copy=True),
        replace(context.spec, steps=steps),
        BatchGradient(context.task),
        draws.generator("public batches", t),
        round=t,
    )
    with draws.forward(device, "public", t):
        update, _ = train(local, x.to(device), y.to(device), Plain())
    if not bool(update.isfinite().all()):
        raise FedveilError(
            f"training on the public split before round {t} gave NaN or infinite numbers: lower training.optimizer.lr"
        )
    return update.to("cpu")
