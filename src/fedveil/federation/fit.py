"""The training loop: sample clients, run them on the engine, aggregate their releases, evaluate, record."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.errors import BudgetExhausted, ConfigError, FedveilError
from fedveil.federation import server
from fedveil.federation.before_round import released as released_before
from fedveil.federation.evaluation import average_in, evaluate, public_statistics
from fedveil.federation.history import ALL_FAILED, Record, all_failed, declared
from fedveil.federation.progress import Federation, Progress
from fedveil.federation.round import ClientTask, Outcome, planned, summed
from fedveil.federation.server import Figures, VisibleRound, server_step
from fedveil.federation.shared_sums import SetPlans
from fedveil.mechanism.plan import Plan, Raw, Released, Upload
from fedveil.methods.method import weighting_of
from fedveil.release.noise import Randomness
from fedveil.release.sealed import Contribution, RunningSum, SealedUpload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedveil.federation.round import Engine
    from fedveil.mechanism.mechanisms import Participation
    from fedveil.methods.setting import Setting


def fit(federation: Federation, engine: Engine, progress: Progress, *callbacks: Callable[[Progress], None]) -> str:
    """Train until the last round, until the budget is spent, or until all clients fail; advance `progress` in place.

    Returns:
        The reason why the run ended early, or an empty string.
    """
    with _older_objects_frozen(), engine:
        while progress.round < federation.setting.rounds:
            if len(progress.spent) == federation.setting.clients:
                return "every client's budget is spent: stop with the last model, or plan more noise next time"
            if reason := _nobody_trains(federation, progress):
                return reason
            try:
                one_round(federation, engine, progress)
            except BudgetExhausted as end:
                return str(end)
            for callback in callbacks:
                callback(progress)
    return ""


def _nobody_trains(federation: Federation, progress: Progress) -> str:
    """Return the reason to stop after a round in which every client failed, or an empty string.

    A round with a single client says little, so it counts only if all earlier rounds failed, too. In a deployment the server does
    not learn who failed, and clients that were left out may be back in the next round. Two kinds of runs go on: one that is
    selected among others, because its number of rounds would depend on the data, and one with `min_survivors`, which states what
    a round needs.
    """
    history, s = progress.history, federation.setting
    if not history or not all_failed(history[-1]) or s.selection is not None or s.min_survivors is not None:
        return ""
    if history[-1]["failed"] == 1 and not (len(history) > 1 and all(map(all_failed, history))):
        return ""
    return f"{ALL_FAILED}, in round {history[-1]['round']}: the reasons are in private/failures.csv"


@contextmanager
def _older_objects_frozen() -> Iterator[None]:
    """Exempt objects from before the run, a few hundred thousand with torch, from garbage collection while it lasts.

    Garbage is collected first: unfrozen objects count as old, and in a process with many short runs the collector never reaches
    them. If other code has frozen objects already, nothing is changed.
    """
    ours = not gc.get_freeze_count()
    if ours:
        gc.collect(1)  # garbage of the last run
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.collect()  # garbage of this run
            gc.unfreeze()


def one_round(federation: Federation, engine: Engine, progress: Progress) -> None:
    """Run one round (clients, door, server, evaluation) and append its record to the history."""
    begin = time.perf_counter()
    tasks, released, plan = begin_round(federation, progress, sample(federation, progress))
    mapped = engine.map(_affordable(federation, progress, tasks) if federation.setting.groups else tasks)
    outcomes = collect_outcomes(mapped) if federation.masks is None else list(mapped)
    record = finish_round(federation, progress, outcomes, plan, released)
    progress.round += 1
    record.private["seconds"] = time.perf_counter() - begin
    if progress.round % federation.evaluate_every == 0 or progress.round == federation.setting.rounds:
        scores = evaluate(federation, progress)
        record.public.update(scores.public)
        record.private.update(scores.private)
    progress.history.append(record)


def begin_round(
    federation: Federation, progress: Progress, chosen: list[int]
) -> tuple[Iterator[ClientTask], Released, Plan | Raw | None]:
    """Return the tasks of the chosen clients, the earlier releases, and the plan if all share one: a round's first half."""
    context = federation.context
    released = released_before(federation, progress)
    if context.summed and not progress.common:
        progress.common = context.policy.start()
    plan = context.plan(released, progress.common) if context.summed else None
    _check_rule(federation, plan)
    executed = None if plan is None else context.shared(plan, len(chosen))
    return _tasks(federation, progress, released, chosen, executed), released, plan


def finish_round(
    federation: Federation, progress: Progress, outcomes: list[Outcome], plan: Plan | Raw | None, released: Released
) -> Record:
    """Release what the clients sealed, move the global model, and return the round's record without scores: the second half."""
    t, s, context = progress.round, federation.setting, federation.context
    weights = {o.client: o.release.weight for o in outcomes if o.release is not None}  # whether a client failed is secret
    remote = any(o.remote for o in outcomes)
    if not weights and len(outcomes) > 1 and not remote and s.min_survivors is None:
        reason = next((o.error for o in outcomes if o.error), "")
        raise FedveilError(f"every client of round {t} failed; the first reason: {reason}")
    uploads, skipped = _uploads(federation, progress, outcomes, plan, released)
    for o in outcomes:
        _remember(progress, o, always=federation.participation is not None)
    seen = VisibleRound(t, len(weights), skipped, len(progress.spent) if s.groups else None)
    if uploads:
        mean, sent = _server_uploads(federation, uploads), [server.coordinates(u, s.layout) for u in uploads]
        noise = server.noise_variances(federation.method, s, uploads, weights, remote=remote)
        seen = replace(seen, uploads=uploads, noise=noise, sent=sent, mean=mean, norm=_step(federation, progress, mean))
    average_in(federation, progress)
    if uploads and all(u.buffers is None for u in uploads):
        progress.buffers = public_statistics(federation, progress)
    states = [progress.common] if context.summed else [progress.policies.get(c, {}) for c in weights]
    return _recorded(federation, progress, outcomes, seen, context.policy.measured(states))


def _recorded(
    federation: Federation,
    progress: Progress,
    outcomes: list[Outcome],
    seen: VisibleRound,
    measured: list[Figures],
) -> Record:
    """Return a round's record; its private half holds only what the public half lacks.

    Args:
        measured: figures that the policy takes of its states, which derive from releases.
    """
    method, s, context = federation.method, federation.setting, federation.context
    columns, policies = declared(context.task, context.objective, context.policy.part), server.means(measured)
    total = "cumulative_noise_norm"
    before = progress.history[-1] if progress.history else Record({total: 0.0})
    seen = replace(seen, noise_before=before.public.get(total))
    visible = seen.in_view(method, s)
    public = server.public_figures(method, s, columns, visible, policies)
    weights = {o.client: o.release.weight for o in outcomes if o.release is not None}
    drawn = {o.client: o.noise_power for o in outcomes if o.client in weights and o.noise_power is not None}
    if drawn and seen.uploads:
        seen = replace(seen, noise=server.noise_variances(method, s, seen.uploads, weights, drawn))
    if total in before.private:
        seen = replace(seen, noise_before=before.private[total])
    figures = {} if seen is visible else server.release_figures(method, s, seen)
    clients = server.client_figures(federation, progress, [*weights], columns, measured)
    private = server.private_figures(seen, outcomes, figures, clients | policies)
    return Record(public, {name: value for name, value in private.items() if (name, value) not in public.items()})


def _check_rule(federation: Federation, plan: Plan | Raw | None) -> None:
    """Refuse a plan whose noise is priced for a participation rule that the sampler does not enforce."""
    assumed = plan.mechanism.participation if isinstance(plan, Plan) else None
    if assumed not in (None, federation.participation):
        raise ConfigError(
            f"the plan's noise is priced for {assumed}, and the sampler enforces {federation.participation}: let `release` "
            "return a Fixed plan if its noise depends on a participation rule"
        )


def sample(federation: Federation, progress: Progress) -> list[int]:
    """Return the clients of the coming round, in ascending order, from secret randomness unless the noise is seeded.

    Under a participation rule the seed decides: secrecy gains nothing there, and a round repeated after a crash must choose the
    same clients.
    """
    s, randomness, rule = federation.setting, federation.context.randomness, federation.participation
    if rule is not None:
        randomness = Randomness(randomness.seed, seeded_noise=True)
    name, free = ("clients", progress.round), _free(progress, s, rule)
    among = s.clients if free is None else len(free)
    if s.sampling == "poisson":
        chosen = randomness.coins(s.rate, among, *name)
    else:
        chosen = randomness.subset(min(s.cohort, among), among, *name)
    return [int(c) for c in (chosen if free is None else free[chosen])]


def _free(progress: Progress, s: Setting, rule: Participation | None) -> NDArray[np.int64] | None:
    """Return the clients that may still take part, or None for all."""
    most = s.max_participations if rule is None else rule.times
    if most is None and not progress.spent:
        return None
    busy = progress.spent | {c for c, k in progress.seen.items() if most is not None and k >= most}
    if rule is not None:
        busy |= {c for c, last in progress.last.items() if progress.round - last < rule.separation}
    return np.setdiff1d(np.arange(s.clients), sorted(busy))


def _tasks(
    federation: Federation, progress: Progress, released: Released, chosen: list[int], plan: Plan | Raw | None
) -> Iterator[ClientTask]:
    clients, by_examples = federation.context.clients, weighting_of(federation.method) == "examples"
    for c in chosen:
        weight = max(clients.size(c), 1) / clients.largest if by_examples else 1.0
        state = progress.common if plan is not None else progress.policies.get(c) or federation.context.policy.start()
        yield ClientTask(c, released, weight, plan, state, progress.privates.get(c, {}), progress.buffers)


def _affordable(federation: Federation, progress: Progress, tasks: Iterable[ClientTask]) -> list[ClientTask]:
    """Return the tasks whose plans fit into their clients' caps; other clients take no further part.

    The decision uses only plans, which are public, before any data are read.
    """
    context, affordable = federation.context, []
    for task in tasks:
        if context.door.admits(planned(context, task), task.client, progress.round):
            affordable.append(task)
        else:
            progress.spent.add(task.client)
    return affordable


def collect_outcomes(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes sorted by client; contributions to one sum are added as they arrive."""
    total, gathered = RunningSum(), []
    for o in outcomes:
        gathered.append(summed(o, total))
        del o  # free its vector before the next one arrives
    return sorted(gathered, key=lambda o: o.client)


def _remember(progress: Progress, outcome: Outcome, *, always: bool) -> None:
    """Record who took part; under a participation rule (`always`) every chosen client counts."""
    if outcome.release is None and not always:
        return
    progress.seen[outcome.client] = progress.seen.get(outcome.client, 0) + 1
    progress.last[outcome.client] = progress.round
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
) -> tuple[list[Upload], str | None]:
    """Release the clients' uploads, charged together, or one noisy mean; otherwise return the reason why nothing is released.

    If remote machines were asked and none answered, nothing is released, unless the sample is secret: then a sum of pure noise is
    released, since a round without one would reveal who was drawn.

    After a skipped round the clients' private states stay as training left them, on every engine: a Flower client does not learn
    that the round was skipped. What these states may cost is charged.
    """
    context, s = federation.context, federation.setting
    releases = [o.release for o in outcomes if o.release is not None]
    uploads = [] if plan is not None else context.door.release_uploads([r for r in releases if isinstance(r, SealedUpload)])
    secret = plan is not None and s.amplified
    skipped: str | None = None
    if s.min_survivors is not None and len(releases) < s.min_survivors:
        skipped = f"{len(releases)} of the {s.min_survivors} clients that privacy.min_survivors asks for"
    elif outcomes and not releases and any(o.remote for o in outcomes) and not secret:
        skipped = f"none of the {len(outcomes)} clients that were asked answered"
    if skipped:
        if isinstance(plan, Plan):
            context.door.charge_skipped([r for r in releases if isinstance(r, Contribution)], plan, progress.round)
        return [], skipped
    if plan is None:
        progress.common = context.policy.observe_all(progress.common, [context.observed(u, released) for u in uploads])
        return uploads, None
    sealed = [c for c in releases if isinstance(c, Contribution)]
    uniform = weighting_of(federation.method) == "uniform" and s.noise_place == "sum"
    denominator = float(s.cohort) if uniform else sum(c.weight for c in sealed)
    if not denominator:
        return [], None
    if federation.masks is not None and isinstance(plan, Plan):
        told, plans = progress.model.numpy().tobytes(), SetPlans(plan, context.door.parts, federation.masks.terms)
        sealed = federation.masks.summed(progress.round, told, sealed, plans)
    upload = context.door.release_sum(sealed, context.shared(plan, len(sealed)), progress.round, denominator)
    progress.common = context.policy.observe(progress.common, context.observed(upload, released))
    return [upload], None


def _server_uploads(federation: Federation, uploads: list[Upload]) -> list[Upload]:
    """Return the uploads that the global model is made of: their mean only, if only the server is assumed to see single ones."""
    if (
        federation.context.summed
        or not federation.is_sum_equivalent
        or any(u.integers is None or u.plan.clamp is not None for u in uploads)
    ):
        return uploads
    return [federation.context.door.mean_of(uploads)]


def _step(federation: Federation, progress: Progress, uploads: list[Upload]) -> float:
    """Move the global model and return the norm of the step given to the server's optimiser."""
    progress.served, direction = server_step(federation.method, federation.setting, progress.served, uploads, progress.model)
    progress.previous = progress.model
    progress.model = progress.model.clone()
    optimizer = federation.server.build(progress.server)
    optimizer.step(progress.model, -direction)
    progress.server = optimizer.state
    buffers = [u.buffers for u in uploads if u.buffers is not None]
    if buffers:
        progress.buffers = torch.stack(buffers).mean(0)
    return float(direction.norm())
