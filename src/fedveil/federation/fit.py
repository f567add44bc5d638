"""A whole run: sample clients, let the engine run them, aggregate what was released, evaluate, record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedveil.errors import BudgetExhausted, FedveilError
from fedveil.federation.evaluate import client_accuracy, predict, score
from fedveil.federation.round import Context, Outcome, Task, observed
from fedveil.release.door import Contribution
from fedveil.release.plan import Plan, Raw, Released, Upload
from fedveil.training.local import Measuring, Personal, State
from fedveil.training.optimizer import OptimizerSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fedveil.federation.clients import Clients
    from fedveil.federation.engine import Engine
    from fedveil.methods.base import Method, Setting
    from fedveil.training.params import FlatModel, Layout

Record = dict[str, Any]
"""One row of history: numbers, and lists of numbers per layer or client."""


@dataclass
class Progress:
    """Everything that a run needs to go on from where it is; plain, so that it checkpoints.

    Args:
        round: the next round. model, previous: global models [d]. common: state of the common policy (aggregate view).
        policies, privates: states per client, created when first needed. seen: rounds each client took part in.
    """

    round: int
    model: Tensor
    previous: Tensor | None = None
    buffers: Tensor | None = None
    common: State = field(default_factory=dict)
    policies: dict[int, State] = field(default_factory=dict)
    privates: dict[int, State] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    server: State = field(default_factory=dict)
    history: list[Record] = field(default_factory=list)


@dataclass(frozen=True)
class Federation:
    """What stays the same over a run.

    Args:
        test: public test examples and labels; server: the server's optimiser on the aggregated step.
        client_tests: each client's own test examples, or None. evaluate_every: rounds between evaluations.
        public: examples and labels that belong to no client, for policies that look at the global model's loss on them.
    """

    setting: Setting
    method: Method
    context: Context
    test: tuple[Tensor, Tensor]
    client_tests: Clients | None = None
    server: OptimizerSpec = field(default_factory=lambda: OptimizerSpec(lr=1.0))
    evaluate_every: int = 1
    public: tuple[Tensor, Tensor] | None = None


def start(federation: Federation) -> Progress:
    """The progress before the first round, from the context's freshly initialised model."""
    return Progress(0, federation.context.model.vector.to("cpu", copy=True))


def fit(federation: Federation, engine: Engine, progress: Progress, after_round: Callable[[Progress], None] | None = None) -> str:
    """Train until the last round or until the budget is spent; `progress` is advanced in place.

    Returns:
        Why the run ended before its last round, or an empty string.
    """
    with engine:
        while progress.round < federation.setting.rounds:
            try:
                one_round(federation, engine, progress)
            except BudgetExhausted as end:
                return str(end)
            if after_round is not None:
                after_round(progress)
    return ""


def one_round(federation: Federation, engine: Engine, progress: Progress) -> None:
    """One round: clients, door, server, evaluation; appends one row to the history."""
    begin = time.perf_counter()
    t, context = progress.round, federation.context
    chosen = sample(federation, progress)
    released = Released(t, progress.model, progress.previous, _public_loss(federation, progress))
    if context.summed and not progress.common:
        progress.common = context.policy.start()
    plan = context.policy.plan(released, progress.common) if context.summed else None
    outcomes = list(engine.map(_tasks(federation, progress, released, chosen, plan)))
    failed = {o.client: o.error for o in outcomes if o.error}
    lost = sum(o.release is None for o in outcomes)
    if lost == len(outcomes) > 1 and federation.setting.min_survivors is None:
        raise FedveilError(f"every client of round {t} failed; the first reason: {next(iter(failed.values()))}")
    record: Record = {"round": t, "participants": len(outcomes) - len(failed), "failed": len(failed), "failures": failed}
    uploads = _uploads(federation, progress, outcomes, plan, released, record)
    for o in outcomes:
        _remember(progress, o)
    if uploads:
        moved = _step(federation, progress, uploads)
        record.update(_measures(federation, uploads, outcomes), update_norm=moved)
    record.update(_own_measures(federation, progress, [o.client for o in outcomes if not o.error]))
    before = progress.history[-1].get("cumulative_noise_norm") if progress.history else 0.0
    if before is not None and (not uploads or "noise_norm" in record):
        record["cumulative_noise_norm"] = before + record.get("noise_norm", 0.0)
    trained = [(o.loss, o.examples) for o in outcomes if not o.error]
    total = sum(n for _, n in trained)
    record["train_loss"] = sum(loss * n for loss, n in trained) / total if total else math.nan
    progress.round += 1
    record["seconds"] = time.perf_counter() - begin
    if progress.round % federation.evaluate_every == 0 or progress.round == federation.setting.rounds:
        record.update(evaluate(federation, progress))
    progress.history.append(record)


def sample(federation: Federation, progress: Progress) -> list[int]:
    """The clients of the coming round, in ascending order; from secret randomness unless noise is seeded."""
    s = federation.setting
    draw = federation.context.randomness.secret("clients", progress.round)
    free: NDArray[np.int64] | None = None
    if s.max_participations is not None:
        spent = [c for c, k in progress.seen.items() if k >= s.max_participations]
        free = np.setdiff1d(np.arange(s.clients), spent)
    among = s.clients if free is None else len(free)
    if s.sampling == "poisson":
        chosen = np.flatnonzero(draw.random(among) < s.rate)
    else:
        chosen = np.sort(draw.choice(among, size=min(s.cohort, among), replace=False))
    return [int(c) for c in (chosen if free is None else free[chosen])]


def _tasks(
    federation: Federation, progress: Progress, released: Released, chosen: list[int], plan: Plan | Raw | None
) -> Iterator[Task]:
    clients = federation.context.clients
    for c in chosen:
        weight = max(clients.size(c), 1) / clients.largest if federation.method.weighting == "examples" else 1.0
        state = progress.common if plan is not None else progress.policies.get(c) or federation.context.policy.start()
        yield Task(c, released, weight, plan, state, progress.privates.get(c, {}), progress.buffers)


def _remember(progress: Progress, outcome: Outcome) -> None:
    if outcome.release is None:
        return
    progress.seen[outcome.client] = progress.seen.get(outcome.client, 0) + 1
    if outcome.policy_state and not isinstance(outcome.release, Contribution):
        progress.policies[outcome.client] = outcome.policy_state
    if outcome.private and not outcome.error:
        progress.privates[outcome.client] = outcome.private


def _uploads(
    federation: Federation,
    progress: Progress,
    outcomes: list[Outcome],
    plan: Plan | Raw | None,
    released: Released,
    record: Record,
) -> list[Upload]:
    """What this round released: the clients' uploads, or their one noisy mean; nothing if too few survived."""
    context, s = federation.context, federation.setting
    given = [o.release for o in outcomes if o.release is not None]
    if s.min_survivors is not None and len(given) < s.min_survivors:
        record["skipped"] = f"{len(given)} of the {s.min_survivors} clients that privacy.min_survivors asks for"
        return []
    if plan is None:
        return [u for u in given if isinstance(u, Upload)]
    sealed = [c for c in given if not isinstance(c, Upload)]
    denominator = float(s.cohort) if federation.method.weighting == "uniform" else sum(c.weight for c in sealed)
    if not denominator:
        return []
    upload = context.door.release_sum(sealed, plan, progress.round, denominator)
    progress.common = context.policy.observe(progress.common, observed(upload, released))
    return [upload]


def _step(federation: Federation, progress: Progress, uploads: list[Upload]) -> float:
    """Move the global model; returns the norm of what the server's optimiser was given."""
    direction = federation.method.aggregate(uploads, progress.model)
    progress.previous = progress.model
    progress.model = progress.model.clone()
    optimizer = federation.server.build(progress.server)
    optimizer.step(progress.model, -direction)
    progress.server = optimizer.state
    buffers = [u.buffers for u in uploads if u.buffers is not None]
    if buffers:
        progress.buffers = torch.stack(buffers).mean(0)
    return float(direction.norm())


def _measures(federation: Federation, uploads: list[Upload], outcomes: list[Outcome]) -> Record:
    """What can be read off the releases: noise and clip per layer, coordinates, bytes."""
    layout = federation.context.door.layout
    clips = torch.stack([_layer_clips(u.plan, len(layout)) for u in uploads])
    sent = [layout.dimension if u.support is None else int(u.support.sum()) for u in uploads]
    senders = sum(o.release is not None for o in outcomes) if uploads[0].client < 0 else 1
    return {
        **_noise(_variances(federation, uploads, outcomes), uploads, layout, by_coverage=federation.method.coverage),
        "clip": float(sum(u.plan.clip for u in uploads) / len(uploads)),
        "coordinates": sum(sent) / len(sent),
        "uplink_bytes": 4 * sum(sent) * senders,
        "layer_clip": clips.mean(0).tolist(),
    }


def _variances(federation: Federation, uploads: list[Upload], outcomes: list[Outcome]) -> list[Tensor]:
    """Mean variance of the noise on what each upload sent of each layer [L]: the door's, and what training drew."""
    layout = federation.context.door.layout
    weights = {o.client: o.release.weight for o in outcomes if o.release is not None}
    drawn = {o.client: o.energy for o in outcomes if o.energy is not None and o.client in weights}
    denominator = federation.setting.cohort if federation.method.weighting == "uniform" else sum(weights.values())
    result = []
    for u in uploads:
        energy = torch.zeros(len(layout))
        if u.client in drawn:
            energy = drawn[u.client]
        elif u.client < 0:
            for c, own in drawn.items():
                energy = energy + own * (weights[c] / denominator) ** 2
        result.append(u.noise_std.square() + energy / _counts(u, layout).clamp_min(1.0))
    return result


def _noise(variances: list[Tensor], uploads: list[Upload], layout: Layout, *, by_coverage: bool) -> Record:
    """Noise of the global step: expected norm, and root mean square per layer over the coordinates that somebody sent.

    Empty where training drew noise of which nothing is known (NaN).
    """
    total = sum(u.weight for u in uploads)
    energy, reached = torch.zeros(len(layout)), torch.zeros(len(layout))
    if by_coverage and any(u.support is not None for u in uploads):
        variance, weight = torch.zeros(layout.dimension), torch.zeros(layout.dimension)
        for u, v in zip(uploads, variances, strict=True):
            there = torch.ones(layout.dimension) if u.support is None else u.support.float()
            variance.add_(layout.expand(v * u.weight**2) * there)
            weight.add_(there, alpha=u.weight)
        variance /= weight.square().where(weight > 0, torch.ones_like(weight))
        energy = torch.stack([part.sum() for part in layout.split(variance)])
        reached = torch.stack([(part > 0).sum() for part in layout.split(weight)]).float()
    else:
        for u, v in zip(uploads, variances, strict=True):
            energy = energy + v * (u.weight / total) ** 2 * _counts(u, layout)
            reached = torch.maximum(reached, _counts(u, layout))
    if energy.isnan().any():
        return {}
    return {"noise_norm": float(energy.sum().sqrt()), "layer_noise_std": (energy / reached.clamp_min(1.0)).sqrt().tolist()}


def _own_measures(federation: Federation, progress: Progress, clients: list[int]) -> Record:
    """The figures of this round's policies and objectives (see `Measuring`): means over the clients, and each client's own."""
    context = federation.context
    policies = [progress.common] if context.summed else [progress.policies.get(c, {}) for c in clients]
    row: Record = {}
    own: dict[int, dict[str, Any]] = {c: {} for c in clients}
    for part, states in ((context.objective, [progress.privates.get(c, {}) for c in clients]), (context.policy, policies)):
        if isinstance(part, Measuring):
            measured = [part.measures(state) if state else {} for state in states]
            row.update(_means([cells for cells in measured if cells]))
            if len(measured) == len(clients) and not (context.summed and part is context.policy):
                for c, cells in zip(clients, measured, strict=True):
                    own[c].update((key, value) for key, value in cells.items() if not isinstance(value, list))
    if any(own.values()):
        row["by_client"] = [{"client": c, **cells} for c, cells in own.items() if cells]
    return row


def _means(rows: list[Mapping[str, float | list[float]]]) -> Record:
    return {key: np.mean([row[key] for row in rows], axis=0).tolist() for key in (rows[0] if rows else {})}


def _public_loss(federation: Federation, progress: Progress) -> float | None:
    if federation.public is None:
        return None
    x, y = federation.public
    model = _global_model(federation, progress)
    with torch.no_grad():
        return score(predict(model, x, progress.buffers is None), y).loss


def _global_model(federation: Federation, progress: Progress) -> FlatModel:
    model = federation.context.model
    model.load(progress.model)
    if progress.buffers is not None:
        model.load_buffers(progress.buffers)
    return model


def _counts(upload: Upload, layout: Layout) -> Tensor:
    """Coordinates sent of each layer [L]."""
    if upload.support is None:
        return torch.tensor(layout.sizes, dtype=torch.float32)
    return torch.stack([part.sum() for part in layout.split(upload.support)]).float()


def _layer_clips(plan: Plan, layers: int) -> Tensor:
    return torch.full((layers,), plan.clip) if plan.layer_clip is None else plan.layer_clip.to(torch.float32)


def evaluate(federation: Federation, progress: Progress) -> Record:
    """Scores of the current global model on the public test set and on the clients' own test sets.

    Where batch statistics never left the clients, batch normalisation uses those of the test batches.
    """
    model = _global_model(federation, progress)
    own_statistics = progress.buffers is None
    x, y = federation.test
    with torch.no_grad():
        scores = score(predict(model, x, own_statistics), y)
        row: Record = {f"test_{k}": v for k, v in vars(scores).items()}
        if federation.client_tests is not None:
            row["client_accuracy"] = client_accuracy(model, federation.client_tests, own_statistics)
            row.update(_personal(federation, progress, federation.client_tests))
    return row


def _personal(federation: Federation, progress: Progress, tests: Clients) -> Record:
    """Accuracy of each client's own model on its own test examples, where the method has such models (see `Personal`)."""
    objective = federation.context.objective
    if not isinstance(objective, Personal):
        return {}
    each: list[float | None] = []
    for c in range(len(tests)):
        model, state = _global_model(federation, progress), progress.privates.get(c, {})
        model.load(objective.personal(progress.model, state))
        if "buffers" in state:
            model.load_buffers(state["buffers"])
        x, y = tests.examples(c)
        own_statistics = progress.buffers is None and "buffers" not in state
        each.append(float((predict(model, x, own_statistics).argmax(1) == y).double().mean()) if len(y) else None)
    known = [a for a in each if a is not None]
    return {"personal_accuracy": each, "mean_personal_accuracy": sum(known) / len(known) if known else math.nan}
