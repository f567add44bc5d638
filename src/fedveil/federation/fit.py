"""A whole run: sample clients, let the engine run them, aggregate what was released, evaluate, record."""

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
from fedveil.federation.server import Figures, SeenRound, server_step
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
    """Train until the last round, until the budget is spent, or until all fail; `progress` is advanced in place.

    Returns:
        Why the run ended before its last round, or an empty string.
    """
    with _older_objects_kept(), engine:
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
    """Return why no further round is charged after one in which every client failed, or an empty string.

    A round of a single client tells of one client only, so it counts where all before it failed, too. Over machines the server
    does not learn who failed, and those who are left out may be back in the next round. A run that is chosen among others goes
    on, since how many rounds it has would tell about the data; and one with `min_survivors`, which says what a round needs.
    """
    history, s = progress.history, federation.setting
    if not history or not all_failed(history[-1]) or s.selection is not None or s.min_survivors is not None:
        return ""
    if history[-1]["failed"] == 1 and not (len(history) > 1 and all(map(all_failed, history))):
        return ""
    return f"{ALL_FAILED}, in round {history[-1]['round']}: the reasons are in private/failures.csv"


@contextmanager
def _older_objects_kept() -> Iterator[None]:
    """Spare the garbage collector, while a run lasts, the objects from before it, a few hundred thousand with torch.

    What is garbage goes first: thawed objects count as old, and in a process of many short runs the collector never gets to
    those. Nothing is changed where somebody else froze objects: they are not ours to thaw.
    """
    ours = not gc.get_freeze_count()
    if ours:
        gc.collect(1)  # since the last run
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.collect()  # of this run
            gc.unfreeze()


def one_round(federation: Federation, engine: Engine, progress: Progress) -> None:
    """One round: clients, door, server, evaluation; appends one row to the history."""
    begin = time.perf_counter()
    tasks, released, plan = asked(federation, progress, sample(federation, progress))
    outcomes = gathered(engine.map(_affordable(federation, progress, tasks) if federation.setting.groups else tasks))
    record = answered(federation, progress, outcomes, plan, released)
    progress.round += 1
    record.private["seconds"] = time.perf_counter() - begin
    if progress.round % federation.evaluate_every == 0 or progress.round == federation.setting.rounds:
        scores = evaluate(federation, progress)
        record.public.update(scores.public)
        record.private.update(scores.private)
    progress.history.append(record)


def asked(
    federation: Federation, progress: Progress, chosen: list[int]
) -> tuple[Iterator[ClientTask], Released, Plan | Raw | None]:
    """The first half of a round: the tasks of the chosen clients, what was released before, and the plan that all have."""
    context = federation.context
    released = released_before(federation, progress)
    if context.summed and not progress.common:
        progress.common = context.policy.start()
    plan = context.plan(released, progress.common) if context.summed else None
    _check_rule(federation, plan)
    return _tasks(federation, progress, released, chosen, plan), released, plan


def answered(
    federation: Federation, progress: Progress, outcomes: list[Outcome], plan: Plan | Raw | None, released: Released
) -> Record:
    """The second half: release what the clients sealed, and move the global model; the round's record but for scores."""
    t, s, context = progress.round, federation.setting, federation.context
    weights = {o.client: o.release.weight for o in outcomes if o.release is not None}  # whether one of them failed is its secret
    remote = any(o.remote for o in outcomes)
    if not weights and len(outcomes) > 1 and not remote and s.min_survivors is None:
        reason = next((o.error for o in outcomes if o.error), "")
        raise FedveilError(f"every client of round {t} failed; the first reason: {reason}")
    uploads, skipped = _uploads(federation, progress, outcomes, plan, released)
    for o in outcomes:
        _remember(progress, o, always=federation.participation is not None)
    seen = SeenRound(t, len(weights), skipped, len(progress.spent) if s.groups else None)
    if uploads:
        mean, sent = _shown(federation, uploads), [server.coordinates(u, s.layout) for u in uploads]
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
    seen: SeenRound,
    measured: list[Figures],
) -> Record:
    """The two halves of a round's record; the private one holds what the public one lacks.

    Args:
        measured: by the policy, of states that are made of releases.
    """
    method, s, context = federation.method, federation.setting, federation.context
    columns, policies = declared(context.task, context.objective, context.policy.part), server.means(measured)
    total = "cumulative_noise_norm"
    before = progress.history[-1] if progress.history else Record({total: 0.0})
    seen = replace(seen, noise_before=before.public.get(total))
    shown = seen.in_view(method, s)
    public = server.public_figures(method, s, columns, shown, policies)
    weights = {o.client: o.release.weight for o in outcomes if o.release is not None}
    drawn = {o.client: o.noise_power for o in outcomes if o.client in weights and o.noise_power is not None}
    if drawn and seen.uploads:
        seen = replace(seen, noise=server.noise_variances(method, s, seen.uploads, weights, drawn))
    if total in before.private:
        seen = replace(seen, noise_before=before.private[total])
    figures = {} if seen is shown else server.release_figures(method, s, seen)
    clients = server.client_figures(federation, progress, [*weights], columns, measured)
    private = server.private_figures(seen, outcomes, figures, clients | policies)
    return Record(public, {name: value for name, value in private.items() if (name, value) not in public.items()})


def _check_rule(federation: Federation, plan: Plan | Raw | None) -> None:
    """Refuse a plan whose price rests on a participation rule that the sampler does not enforce."""
    assumed = plan.mechanism.participation if isinstance(plan, Plan) else None
    if assumed not in (None, federation.participation):
        raise ConfigError(
            f"the plan's noise is priced for {assumed}, and the sampler enforces {federation.participation}: a release whose "
            f"noise rests on a rule of participation is Fixed"
        )


def sample(federation: Federation, progress: Progress) -> list[int]:
    """The clients of the coming round, in ascending order; from secret randomness unless noise is seeded.

    Under a participation rule nothing is gained by secrecy, and a round that is done again after a crash must choose the same
    clients: then the seed decides.
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
    """The clients that may still take part; None for all."""
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
    """The tasks whose plans fit into their clients' caps; the other clients take no further part.

    Decided by plans, which are public, before any data are touched.
    """
    context, kept = federation.context, []
    for task in tasks:
        if context.door.admits(planned(context, task), task.client, progress.round):
            kept.append(task)
        else:
            progress.spent.add(task.client)
    return kept


def gathered(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcomes by client, the contributions to one sum added up as they come."""
    total, gathered = RunningSum(), []
    for o in outcomes:
        gathered.append(summed(o, total))
        del o  # its vector, before the next one comes
    return sorted(gathered, key=lambda o: o.client)


def _remember(progress: Progress, outcome: Outcome, *, always: bool) -> None:
    """Count who took part; under a participation rule whoever was chosen, `always`."""
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
    """Release what the clients sealed: their uploads, charged together, or one noisy mean; or say why nothing is released.

    Where machines were asked and none answered, nothing is released either, unless the sample is secret: there the sum of nobody
    leaves with its noise, since a round without one would tell who was drawn.

    A skipped round leaves the clients' private states as training made them, on every engine: a client over Flower does not learn
    that it was skipped. What these may cost is charged.
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
    denominator = float(s.cohort) if weighting_of(federation.method) == "uniform" else sum(c.weight for c in sealed)
    if not denominator:
        return [], None
    upload = context.door.release_sum(sealed, plan, progress.round, denominator)
    progress.common = context.policy.observe(progress.common, context.observed(upload, released))
    return [upload], None


def _shown(federation: Federation, uploads: list[Upload]) -> list[Upload]:
    """What the global model is made of: where all but the server are credited with seeing a sum, nothing else of it."""
    if (
        federation.context.summed
        or not federation.adds_up
        or any(u.integers is None or u.plan.clamp is not None for u in uploads)
    ):
        return uploads
    return [federation.context.door.mean_of(uploads)]


def _step(federation: Federation, progress: Progress, uploads: list[Upload]) -> float:
    """Move the global model; returns the norm of what the server's optimiser was given."""
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
