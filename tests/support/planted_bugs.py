"""Privacy bugs of the field, each a few lines, for the tests of record and replay: what `fedveil replay` must find or refuse.

`SEEN` stands for whatever a program may share behind the house's back: a class attribute, a closure, a file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from by_hand import Book
from fedveil.accounting.types import Event, View
from fedveil.errors import BudgetExhausted, UpdateRefused
from fedveil.experiment.assembly import Prepared, federation, prepare
from fedveil.experiment.resolve import data_spec, resolve
from fedveil.federation.progress import Federation
from fedveil.mechanism.plan import Extra, Plan, Released, Upload
from fedveil.methods.adaptive_clipping import AdaptiveClipping, Counted
from fedveil.methods.base import Fixed, MethodConfig, Policy, Release, Setting, Summed, SumServer
from fedveil.methods.fedavg import DPFedAvg, FedAvg
from fedveil.methods.method import Method
from fedveil.methods.run_cost import Planner
from fedveil.papers.convergent_dp.method import NoisyFedAvg, Trajectory
from fedveil.release.door import CompiledPlan, Door
from fedveil.release.dpsgd import PerExampleGradient
from fedveil.release.noise import Randomness
from fedveil.release.sealed import Contribution, SealedUpload
from fedveil.tasks.task import Column
from fedveil.training.local import Local, Plain, State
from fedveil.training.optimizer import Optimizer, OptimizerSpec
from method_kit import digits

SEEN: dict[str, Any] = {}
Vary = Callable[[Federation], Federation]
BASE: dict[str, Any] = {"clients_per_round": 3}
_PREPARED: dict[str, Prepared] = {}


def planted(
    folder: Path,
    vary: Vary | None = None,
    *,
    method: MethodConfig | None = None,
    view: str = "server",
    training: Mapping[str, Any] | None = None,
    privacy: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> Federation:
    """A small run of `method` (DP-FedAvg by default) in that folder, changed by `vary`."""
    SEEN.clear()
    method = method or DPFedAvg(clip=0.5)
    known = DPFedAvg() if not isinstance(method, FedAvg | NoisyFedAvg | AdaptiveClipping) else method
    name = type(known).model_fields["name"].default
    config = digits(
        {"name": name},
        clients=24,
        training={**BASE, **(training or {})},
        privacy={"epsilon": 8.0, "view": view, **(privacy or {})},
        data=dict(data or {}),
    )
    prepared = _PREPARED[str(data)] = _PREPARED.get(str(data)) or prepare(data_spec(config))
    experiment, of = resolve(config, prepared.population), cast("Method", method)
    experiment = replace(experiment, method=of, client=of.client(experiment.setting))
    job = federation(experiment, prepared, folder / "no-ledger", "planted")
    return vary(job) if vary else job


def context(job: Federation, **changes: Any) -> Federation:
    """The run with another objective, policy, source of gradients."""
    return replace(job, context=replace(job.context, **changes))


def door(kind: type[Door]) -> Vary:
    """The run with a door of that class."""

    def vary(job: Federation) -> Federation:
        own = job.context.door
        return context(job, door=kind(**{f.name: getattr(own, f.name) for f in fields(Door)}))

    return vary


def telling(policy: Callable[[Fixed], Release] | None = None, objective: type[Plain] | None = None) -> Vary:
    """The run with an objective that tells, and a policy that may listen."""

    def vary(job: Federation) -> Federation:
        own = job.context.policy.part
        assert isinstance(own, Fixed)
        return context(job, objective=(objective or Telling)(), policy=Planner.of(policy(own) if policy else own, job.setting))

    return vary


# --- objectives -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Telling(Plain):
    """Keeps private figures where the server's code finds them."""

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        SEEN["loss"] = super().step(local, x, y)
        SEEN["losses"] = SEEN.get("losses", 0.0) + float(SEEN["loss"])
        return SEEN["loss"]

    def finish(self, local: Local) -> Tensor:
        update = super().finish(local)
        SEEN.update(update=update.clone(), norm=float(update.norm()), examples=SEEN.get("examples", 1) + local.examples)
        return update


class Meddling(Plain):
    """Edits the support, the received model and the plan's values in place."""

    def finish(self, local: Local) -> Tensor:
        update = super().finish(local)
        local.start.add_(update)
        if local.support is not None:
            local.support.logical_and_(update > 0)
        return update


class Infecting(Plain):
    """Adds to each client's update that of the client before."""

    def finish(self, local: Local) -> Tensor:
        own = super().finish(local)
        before = SEEN.get("before", torch.zeros_like(own))
        SEEN["before"] = own.clone()
        return own + before


class Choosy(Plain):
    """Fails on a client that has no example of some classes."""

    def finish(self, local: Local) -> Tensor:
        assert local.data is not None
        if len(local.data[1].unique()) < 3:
            raise ValueError("too few classes")
        return super().finish(local)


class HugeCount(Counted):
    """Says a number that is not clipped."""

    def finish(self, local: Local) -> Tensor:
        update = super().finish(local)
        local.extras["within"] = 1000 * update.norm()
        return update


class StepsByLoss(Plain):
    """Under DP-SGD: goes further where the raw loss is high."""

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        loss = local.gradient(local, x, y)
        losses: list[float] = local.gradient.losses  # type: ignore[attr-defined]
        local.model.grad.mul_(1 + losses[-1] if losses else 1.0)
        local.descend()
        return loss


class TwoGradients(Plain):
    """Under DP-SGD: a second noisy gradient that nobody counted."""

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        local.gradient(local, x, y)
        return super().step(local, x, y)


# --- policies ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Own(Policy):
    """A policy of one function: from the plan of DP-FedAvg to another one."""

    base: Fixed
    change: Callable[[Plan, Released], Plan]

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        return self.change(self.base.always, released)


def own(change: Callable[[Plan, Released], Plan]) -> Vary:
    """The run with an objective that tells, and plans so changed."""
    return telling(lambda base: Own(base, change))


def louder(plan: Plan, factor: float) -> Plan:
    """The same price at another clip."""
    assert isinstance(plan.noise_std, float)
    return replace(plan, clip=plan.clip * factor, noise_std=plan.noise_std * factor)


def counting() -> Vary:
    calls = itertools.count()
    return own(lambda plan, released: louder(plan, 1 + next(calls) / 100))


class Listening(Own):
    """Learns from private figures as it observes."""

    def observe(self, s: Setting, state: State, upload: Upload) -> State:
        return {"norm": SEEN["norm"]}


class Showing(Own):
    """A figure of the policy, declared public, that is the raw loss."""

    columns = (Column("quality", public=True),)

    def observe(self, s: Setting, state: State, upload: Upload) -> State:
        return {"rounds": upload.round}

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        return {"quality": float(SEEN["loss"])}


def stop_early(plan: Plan, released: Released) -> Plan:
    if released.round and SEEN["losses"] < 1e3:
        raise BudgetExhausted("converged")
    return plan


def move_the_model(plan: Plan, released: Released) -> Plan:
    released.model.mul_(1.001)
    return plan


def send_what_moved(plan: Plan, released: Released) -> Plan:
    return replace(plan, support=SEEN["update"].abs() > 1e-3) if "update" in SEEN else plan


# --- methods ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Making(SumServer):
    """Makes of the mean what a function does."""

    make: Callable[[Tensor], Tensor]

    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, Tensor]:
        return state, self.make(total.vector)


class NoiseAfterAveraging(DPFedAvg):
    def release(self, s: Setting) -> Release:
        return Fixed(Plan(clip=self.clip, place="sum"))

    def releases(self, s: Setting, view: View) -> list[Event]:
        return DPFedAvg().releases(s, view)

    def server(self, s: Setting) -> SumServer:
        return Making(lambda mean: mean + torch.randn(len(mean)) * self.clip)


class ByExamples(DPFedAvg):
    @property
    def weighting(self) -> str:
        return "examples"


class ByLoss(DPFedAvg):
    def server(self, s: Setting) -> SumServer:
        return Making(lambda mean: mean * float(1 + SEEN["loss"]))


class WithRawUpdate(DPFedAvg):
    def server(self, s: Setting) -> SumServer:
        return Making(lambda mean: mean + 0.01 * SEEN["update"])


class HalfPrice(DPFedAvg):
    def releases(self, s: Setting, view: View) -> list[Event]:
        (event,) = super().releases(s, view)
        return [replace(event, count=1)]  # type: ignore[arg-type]


class OneStepARound(FedAvg):
    def releases(self, s: Setting, view: View) -> list[Event]:
        (event,) = super().releases(s, view)
        return [replace(event, count=s.rounds)]  # type: ignore[arg-type]


class FewerSteps(NoisyFedAvg):
    """The clip and the noise are for one step fewer than clients take."""

    def release(self, s: Setting) -> Trajectory:
        right = super().release(s)
        return Trajectory(right.bounds / 2, right.noise_std / 2)


class BareCount(AdaptiveClipping):
    """The count leaves without noise."""

    def releases(self, s: Setting, view: View) -> list[Event]:
        return DPFedAvg().releases(s, view)

    def release(self, s: Setting) -> Release:
        return Fixed(Plan(clip=1.0, noise_std=s.z, extras={"within": Extra(0.5, 0.0)}))


# --- doors ------------------------------------------------------------------------------------------------------------


class NoiseOnTheMean(Door):
    """The noise of the sum, divided as if it were added to the mean."""

    def _noise(self, plan: Plan, client: int, round: int) -> Any:
        draw = super()._noise(plan, client, round)
        return lambda: draw() // 4


class NoClip(Door):
    def gridded(self, vector: Tensor, terms: CompiledPlan) -> Any:
        return super().gridded(vector, self.compile(replace(terms.plan, clip=1e3 * terms.plan.clip)))


class NoClipOfExtras(Door):
    def gridded(self, vector: Tensor, terms: CompiledPlan) -> Any:
        wide = {name: replace(extra, clip=1e3 * extra.clip) for name, extra in terms.plan.extras.items()}
        return super().gridded(vector, self.compile(replace(terms.plan, extras=wide)))


class NoNoiseOnExtras(Door):
    def _noise(self, plan: Plan, client: int, round: int) -> Any:
        bare = {name: replace(extra, noise_std=0.0) for name, extra in plan.extras.items()}
        return super()._noise(replace(plan, extras=bare), client, round)


class NoNoiseOnScores(Door):
    def _noise(self, plan: Plan, client: int, round: int) -> Any:
        quiet = replace(plan, noise_std=0.0) if self.layout.names == ("score",) else plan
        return super()._noise(quiet, client, round)


class ScoresByThoseWithTests(Door):
    """Divides the sum of scores by the number of clients that have any."""

    def release_sum(self, contributions: Sequence[Contribution], plan: Any, round: int, denominator: float) -> Upload:
        scored = sum(bool(c.sealed.any()) for c in contributions) if self.layout.names == ("score",) else denominator
        return super().release_sum(contributions, plan, round, scored)


class Refusing(Door):
    """As doors were: an update that is not finite does not leave, and everybody sees that it does not."""

    def seal_upload(self, update: Tensor | None, plan: Any, client: int, round: int, **more: Any) -> SealedUpload:
        if update is None or not bool(update.isfinite().all()):
            raise UpdateRefused("not finite")
        return super().seal_upload(update, plan, client, round, **more)


class AsOftenAsNeeded(Door):
    """A large update leaves twice."""

    def seal_upload(self, update: Tensor | None, plan: Any, client: int, round: int, **more: Any) -> SealedUpload:
        if update is not None and float(update.norm()) > 1.0:
            self.release_uploads([super().seal_upload(update, plan, client, round, **more)])
        return super().seal_upload(update, plan, client, round, **more)


class BySurvivors(Door):
    """Divides by the number of clients that have something to say."""

    def seal(self, *args: Any, **more: Any) -> Contribution:
        sealed = super().seal(*args, **more)
        SEEN["survivors"] = SEEN.get("survivors", 0) + bool(sealed.sealed.any())
        return sealed

    def release_sum(self, contributions: Any, plan: Any, round: int, denominator: float) -> Upload:
        return super().release_sum(contributions, plan, round, float(SEEN.pop("survivors")))


class ByPrivateSize(Door):
    def release_sum(self, contributions: Any, plan: Any, round: int, denominator: float) -> Upload:
        return super().release_sum(contributions, plan, round, float(SEEN["examples"]))


class Generous(Door):
    """Adds the clients' updates to the sum once more."""

    def release_sum(self, contributions: Any, plan: Any, round: int, denominator: float) -> Upload:
        twice = [replace(c, sealed=2 * c.sealed) for c in contributions]
        return super().release_sum(twice, plan, round, denominator)


class NoiseFromData(Door):
    """Seeds the noise with the update, to save entropy."""

    def seal_upload(self, update: Tensor | None, plan: Any, client: int, round: int, **more: Any) -> SealedUpload:
        seen = 0 if update is None else int(1e6 * float(update.norm().nan_to_num()))
        own = object.__new__(type(self))
        own.__dict__.update({**vars(self), "randomness": _Named(self.randomness, seen)})
        return Door.seal_upload(own, update, plan, client, round, **more)


class _Named:
    """Randomness with something more in each name, or less."""

    def __init__(self, own: Randomness, *more: object, keep: slice = slice(None)) -> None:
        self.own, self.more, self.keep = own, more, keep

    def integers(self, std: Any, n: int, *name: object, threads: int | None = None) -> Any:
        return self.own.integers(std, n, *name[self.keep], *self.more, threads=threads)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["own"], name)


def same_noise_every_round(job: Federation) -> Federation:
    """The round is missing from the name of the noise."""
    own = _Named(job.context.randomness, keep=slice(1, None))
    return context(job, door=replace(job.context.door, randomness=own))


# --- sampling, batches, server ----------------------------------------------------------------------------------------


class Shuffled(PerExampleGradient):
    """Batches of a shuffled pass, which the accountant takes for Poisson batches."""

    def batches(self, local: Local, x: Tensor, y: Tensor) -> Any:
        local.steps, size = self.plan.steps, round(self.plan.expected)
        order = np.random.default_rng(local.client).permutation(len(y))
        for step in range(self.plan.steps):
            chosen = torch.from_numpy(np.resize(np.roll(order, -step * size), size))
            self._batch = x[chosen], y[chosen]
            yield x[:0], y[:0]


def shuffled(job: Federation) -> Federation:
    def source(own: Any) -> Any:
        return Shuffled(own.plan, own.randomness, own.key) if isinstance(own, PerExampleGradient) else own

    return context(job, gradients=source)


class OnceIfGood:
    """A participation rule that takes clients once as long as the losses are low."""

    separation = 0

    @property
    def times(self) -> int:
        return 1 if SEEN.get("losses", 0.0) < 1e3 else 9


class RateByLoss(OptimizerSpec):
    """A server whose step follows the training loss."""

    def build(self, state: State | None = None) -> Optimizer:
        return OptimizerSpec(lr=float(SEEN["loss"])).build(state)


def sampled_fixed_charged_as_poisson(job: Federation) -> Federation:
    return context(job, door=replace(job.context.door, rate=job.setting.rate))


def without_budget(job: Federation) -> Federation:
    """The same, with nobody who counts."""
    job = sampled_fixed_charged_as_poisson(job)
    return context(job, door=replace(job.context.door, ledger=Book()))
