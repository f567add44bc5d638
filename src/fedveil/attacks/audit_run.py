"""Audit a configuration: attack its policy, objective and door on worst-case neighbours or with canaries."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from fedveil.accounting.types import Audit, Unbounded, Unit, View
from fedveil.attacks.snapshot import uncharged
from fedveil.audit import dp_sgd_audit
from fedveil.audit.adapter import Case, first_plan, gaussian_run, release_subject, run_score, sampled_run
from fedveil.audit.canaries import run_with_canaries
from fedveil.audit.low_bits import audit_released_bits
from fedveil.audit.single_upload import single_upload
from fedveil.audit.subject import Subject
from fedveil.audit.training_audit import audit_last_model, pairs, training_subject
from fedveil.audit.two_world import Repeats, Run, many_runs, many_sampled_runs
from fedveil.errors import ConfigError
from fedveil.executors.select_engine import engine
from fedveil.experiment.data_card import NOTHING, HandedOver, reopened
from fedveil.experiment.resolve import opened, resolve
from fedveil.mechanism.plan import LocalDpSgd, Plan
from fedveil.methods.gradient_compression import Defence
from fedveil.methods.run_cost import events_in_view
from fedveil.training.cores import process_state

if TYPE_CHECKING:
    from fedveil.experiment.assembly import Prepared
    from fedveil.experiment.config import Config
    from fedveil.experiment.experiment import Experiment
    from fedveil.federation.round import Context, Engine
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting
    from fedveil.statement.statement import Statement


Result = TypeVar("Result")
InWorld = Callable[[int, np.random.Generator], Result]
"""A run or a release in world 0 or 1."""
Step = Callable[[int, int, str], None]
"""Called with the releases or runs of a step that are done, their number or 0 if the step is one piece, and its description."""


def audit_canaries(experiment: Experiment, prepared: Prepared, canaries: int, on_step: Step | None = None) -> list[Audit]:
    """Train the experiment once with canary clients, and estimate epsilon in the final and the aggregate view.

    Args:
        canaries: number of canary clients, from 2 to the number of clients; half of them is a good choice in small federations.
        on_step: callback after each round.

    Raises:
        ConfigError: see `run_with_canaries`.
    """
    job = uncharged(experiment, prepared, experiment.seed)
    rounds, delta = job.setting.rounds, job.setting.delta

    def make(context: Context) -> Engine:
        return engine(experiment.engine.name, context, experiment.engine.timeout)

    def on_round(round: int) -> None:
        if on_step is not None:
            on_step(round, rounds, f"{canaries} canary clients, rounds")

    return run_with_canaries(job, make, canaries, np.random.default_rng(experiment.seed), on_round).audits(delta)


ROUNDS = 10
"""The most rounds of a run that are audited: a lower bound for part of a run also holds for all of it."""
_PRIVATE_ROUNDS = 5
"""The same limit for methods that add noise inside training, where each release requires local training."""

_EXAMPLE_DIMENSION, _CANARIES = 60, 1000
"""Dimensions in audits of DP-SGD: of runs with and without one example, and of one run with a canary for each coordinate."""
_LAST_MODEL_DIMENSION = 40


@process_state()
def audit(
    config: Config, *, n: int = 1000, confidence: float = 0.95, canaries: int = 0, on_step: Step | None = None
) -> list[Audit]:
    """Audit a configuration in the view of its promise (see `audit_setting`); with canaries, also by one run on its data."""
    if canaries:
        return _audited(*opened(config), Audits(n, confidence, canaries), on_step)
    return _audited(resolve(config), None, Audits(n, confidence), on_step)


@dataclass(frozen=True)
class Audits:
    """The size of an audit: releases or runs per world, the joint confidence of all bounds, and canary clients."""

    n: int = 1000
    confidence: float = 0.95
    canaries: int = 0


def _audited(experiment: Experiment, prepared: Prepared | None, size: Audits, on_step: Step | None) -> list[Audit]:
    estimates = audit_canaries(experiment, prepared, size.canaries, on_step) if prepared is not None and size.canaries else []
    method, setting, seed = experiment.method, experiment.setting, experiment.seed
    return [
        *audit_setting(method, setting, n=size.n, confidence=size.confidence, seed=seed, on_step=on_step),
        *estimates,
    ]


@process_state()
def audit_setting(
    method: Method, setting: Setting, *, n: int = 1000, confidence: float = 0.95, seed: int = 0, on_step: Step | None = None
) -> list[Audit]:
    """Return statistical lower bounds on epsilon for a calibrated setting, one per attack.

    Args:
        n: tested releases or runs per world. confidence: joint confidence of all bounds, in [0.5, 1). seed: of inputs and noise.
        on_step: called as each attack begins and goes on (see `Step`).

    Raises:
        ConfigError: n or confidence is out of range, the method promises nothing by construction, or the clients run DP-SGD and
            the unit of privacy is the client.
    """
    if n < 10 or not 0.5 <= confidence < 1:
        raise ConfigError(f"an audit needs n >= 10 and a confidence in [0.5, 1), got n = {n}, confidence = {confidence}")
    if isinstance(method, Defence):
        raise ConfigError(f"{method.name} promises nothing, so there is no epsilon to test: attack it (fedveil attack --kind ig)")
    case, rng, alpha = Case.of(method, setting), np.random.default_rng(seed), 1 - confidence
    on_step = on_step or (lambda done, total, what: None)
    plan = first_plan(case)
    if not isinstance(plan, Plan):
        return _in_training(case, rng, n, alpha, on_step)
    if isinstance(plan, LocalDpSgd):
        return _dp_sgd(method, setting, rng, n, alpha, on_step)
    if setting.scope.view is View.FINAL:
        on_step(0, 0, f"the last model of {setting.rounds} rounds")
        small = Case.of(method, setting, dimension=_LAST_MODEL_DIMENSION)
        return [audit_last_model(small, rng, n=n, delta=setting.delta, alpha=alpha)]
    cases = [case, *_claimed_sum(case)]
    steps = _Steps(on_step, 3 * len(cases))
    return [bound for case in cases for bound in _at_the_door(case, rng, n, alpha / len(cases), steps)]


@dataclass
class _Steps:
    """Steps of an audit, told by their numbers."""

    on_step: Step
    steps: int
    begun: int = 0
    name: str = ""

    def begin(self, what: str) -> None:
        """Tell that the next step begins."""
        self.begun += 1
        self.name = f"step {self.begun} of {self.steps}, {what}"
        self.on_step(0, 0, self.name)

    def counted(
        self, run: Callable[[int, np.random.Generator], Result], total: int
    ) -> Callable[[int, np.random.Generator], Result]:
        """Return the run or release, which then tells how many of the total were begun."""
        numbers = count()

        def counted_run(world: int, rng: np.random.Generator, /) -> Result:
            self.on_step(min(next(numbers), total), total, self.name)
            return run(world, rng)

        return counted_run

    def counted_subject(self, subject: Subject, total: int) -> Subject:
        """Return the subject, whose releases are counted."""
        return replace(subject, mechanism=self.counted(subject.mechanism, total))


def _claimed_sum(case: Case) -> list[Case]:
    """Return the case of the summed uploads, each with its share of the noise, if the claim is about sums; else an empty list."""
    s, claim = case.setting, case.method.claim(case.setting)
    if claim is None or claim.scope.view is not View.AGGREGATE or s.scope.view is not View.SERVER or s.sampling == "poisson":
        return []
    return [replace(case, setting=replace(s, scope=replace(s.scope, view=View.AGGREGATE)))]


def _at_the_door(case: Case, rng: np.random.Generator, n: int, alpha: float, steps: _Steps) -> list[Audit]:
    """Audit the released bits, one release and, if the run is bounded, several rounds, each at an equal share of alpha."""
    delta, d = case.setting.delta, case.setting.layout.dimension
    planned = events_in_view(case.method, case.setting, case.setting.scope.view)
    bounded = not any(isinstance(event, Unbounded) for event in planned)
    share = alpha / (3 if bounded else 2)
    what = "one sum" if case.summed else "one release"
    steps.begin(f"the bits of {what}")
    bits = audit_released_bits(case, rng, n=n, delta=delta, alpha=share)
    steps.begin(what)
    pilot = max(n // 2, 20)
    subject = steps.counted_subject(release_subject(case, rng), 2 * (n + pilot))
    one = single_upload(subject, rng, n=n, pilot=pilot, delta=delta, alpha=share).headline
    bounds = [replace(one, note=f"worst pair at the real door, d = {d}; {one.note}"), *([] if bits is None else [bits])]
    if math.isinf(one.epsilon) or not bounded:
        return bounds
    rounds = min(case.setting.participations, ROUNDS)
    steps.begin(f"{rounds} rounds{', summed' if case.summed else ''}")
    repeats = Repeats.of(n, delta, share)
    return [*bounds, _whole_run(case, rounds, rng, repeats, steps.counted(run_score(case, rounds), repeats.total))]


def _whole_run(case: Case, rounds: int, rng: np.random.Generator, repeats: Repeats, run: Run) -> Audit:
    event = sampled_run(case, rounds, rng)
    if event is not None:
        note = f"canary in {rounds} of {case.setting.rounds} rounds, each by chance {case.rate:.4g}"
        return many_sampled_runs(run, event, case.scope, rng, repeats, note=note)
    note, gaussian = f"canary in {rounds} of {case.setting.rounds} rounds", gaussian_run(case, rounds, rng)
    return many_runs(run, case.scope, rng, repeats, gaussian=gaussian, note=note)


def _dp_sgd(method: Method, setting: Setting, rng: np.random.Generator, n: int, alpha: float, on_step: Step) -> list[Audit]:
    """Audit DP-SGD in two worlds and in one run with canaries, each at half of alpha, so that both bounds hold jointly."""
    if setting.scope.unit is not Unit.RECORD:
        raise ConfigError("DP-SGD inside clients protects records: set privacy.unit = 'record' to audit what it promises")
    rounds, steps = min(setting.participations, ROUNDS), _Steps(on_step, 2)
    small, wide = (
        dp_sgd_audit.DpSgdClient(Case.of(method, setting, dimension=d), rounds) for d in (_EXAMPLE_DIMENSION, _CANARIES)
    )
    steps.begin(f"{rounds} rounds of DP-SGD, one example")
    bounds = [dp_sgd_audit.audit_two_worlds(small, rng, n=n, delta=setting.delta, alpha=alpha / 2, counted=steps.counted)]
    if small.step.noise_multiplier:
        steps.begin(f"{rounds} rounds of DP-SGD, {wide.case.setting.layout.dimension} canary examples")
        bounds.append(dp_sgd_audit.audit_canaries(wide, rng, delta=setting.delta, alpha=alpha / 2))
    return bounds


def _in_training(case: Case, rng: np.random.Generator, n: int, alpha: float, on_step: Step) -> list[Audit]:
    """Audit noise inside training: one attack per pair of neighbours, each at an equal share of alpha."""
    rounds = min(case.setting.participations, _PRIVATE_ROUNDS)
    claim = case.method.claim(case.setting)
    views = [0] + ([case.setting.cohort - 1] if claim is not None and claim.scope.view is not View.SERVER else [])
    bounds, attacks = [], [(neighbours, peers) for neighbours in pairs(case, rounds) for peers in views]
    steps = _Steps(on_step, len(attacks))
    for neighbours, peers in attacks:
        steps.begin(f"{rounds} rounds, {neighbours.name}{', summed' if peers else ''}")
        share, pilot = alpha / len(attacks), max(n // 4, 20)
        subject = steps.counted_subject(training_subject(case, neighbours, rng, rounds=rounds, peers=peers), 2 * (n + pilot))
        one = single_upload(subject, rng, n=n, pilot=pilot, delta=case.setting.delta, alpha=share).headline
        bounds.append(replace(one, note=f"{neighbours.name} through local training, {rounds} rounds; {one.note}"))
    return bounds


@process_state()
def audit_config(
    config: Config, *, n: int = 1000, confidence: float = 0.95, canaries: int = 0, on_step: Step | None = None
) -> Statement:
    """Return the statement of a configuration with its audits; nothing is trained on its data."""
    experiment, prepared = opened(config) if canaries else (resolve(config), None)
    return experiment.statement.with_audits(_audited(experiment, prepared, Audits(n, confidence, canaries), on_step))


@process_state()
def audit_run(
    run: Path,
    *,
    n: int = 1000,
    confidence: float = 0.95,
    canaries: int = 0,
    on_step: Step | None = None,
    handed_over: HandedOver = NOTHING,
) -> Statement:
    """Audit the mechanism of a run and write the bounds to `audits.json` in its directory.

    They replace earlier bounds of the same unit, adjacency and view (estimates replace estimates), so that the file has the
    result of one call and not the most favourable of many.

    Args:
        handed_over: data, partition and model that a program passed to the run.

    Raises:
        ConfigError: this is not a run directory, it is of an earlier version, the data are not those of the run, or the audits
            cannot be written (the message then contains the bounds).
    """
    from fedveil.experiment import run_directory as rundir
    from fedveil.experiment.config_files import load_recorded
    from fedveil.experiment.resume import refuse_earlier
    from fedveil.statement.statement_layout import AUDITS, audits_to_list, read_statement

    refuse_earlier(run)
    before = read_statement(run)
    config = load_recorded(run)
    if canaries or config.data.handed_over or handed_over.names:
        found = _audited(*reopened(run, handed_over), Audits(n, confidence, canaries), on_step)
    else:
        found = audit(config, n=n, confidence=confidence, on_step=on_step)
    again = {(one.scope, one.rigorous) for one in found}
    kept = (replace(v, audits=tuple(a for a in v.audits if (a.scope, a.rigorous) not in again)) for v in before.views)
    statement = replace(before, views=tuple(kept)).with_audits(found)
    try:
        rundir.write_json(run / AUDITS, audits_to_list(statement))
    except OSError as problem:
        bounds = "; ".join(map(str, found))
        raise ConfigError(f"cannot write {run / AUDITS}: {problem.strerror}; audit again. Found: {bounds}") from problem
    return statement
