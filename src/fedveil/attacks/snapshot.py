"""The state that is attacked: a federation at the beginning of a round, with a door that charges nobody.

An attack is a simulation, so its noise comes from the attack's seed and no ledger records its releases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedveil.attacks.attack_types import Bounds, ModelFn
from fedveil.attacks.matching import split
from fedveil.errors import ConfigError
from fedveil.executors.select_engine import engine
from fedveil.experiment.assembly import Prepared, federation
from fedveil.experiment.config_files import load_config, load_recorded
from fedveil.experiment.experiment import Experiment
from fedveil.experiment.resume import identity, run_id_of
from fedveil.federation.before_round import released
from fedveil.federation.checkpoint import Checkpoints
from fedveil.federation.fit import one_round
from fedveil.federation.progress import Federation, Progress, start
from fedveil.mechanism.mechanisms import STATE_FILE, NoiseMemory
from fedveil.mechanism.plan import Plan, Released
from fedveil.methods.base import Fixed
from fedveil.methods.run_cost import Planner
from fedveil.release.noise import Randomness
from fedveil.release.release_layout import NullLedger
from fedveil.training.local import Plain

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedveil.data.catalogue import Info
    from fedveil.experiment.config import Config
    from fedveil.experiment.experiment import EngineSpec
    from fedveil.training.params import Layout

OnRound = Callable[[int, int], None]


@dataclass(frozen=True)
class Snapshot:
    """A federation at the beginning of round `progress.round`, with its public values."""

    experiment: Experiment
    prepared: Prepared
    federation: Federation
    progress: Progress

    @property
    def info(self) -> Info:
        return self.prepared.dataset.info

    @property
    def layout(self) -> Layout:
        return self.federation.context.door.layout

    @property
    def summed(self) -> bool:
        """Return whether uploads are summed before anyone sees them."""
        return self.federation.context.summed

    @cached_property
    def released(self) -> Released:
        """The released values that everyone has at the beginning of the round."""
        return released(self.federation, self.progress)

    @property
    def state(self) -> dict[str, Tensor]:
        """The global model by parameter."""
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        return split(self.progress.model, {k: torch.empty(shape) for k, shape in shapes.items()})

    @cached_property
    def bounds(self) -> Bounds:
        """The range of the data: pixels from 0 to 1; for signals the range of the public test examples, per channel."""
        info, (x, _) = self.info, self.federation.test
        if len(info.input_shape) == 3:
            low = tuple(-m / s for m, s in zip(info.mean, info.std, strict=True))
            return Bounds(info.input_shape, low, tuple((1 - m) / s for m, s in zip(info.mean, info.std, strict=True)))
        channels = x.transpose(0, 1).flatten(1)
        low, high = tuple(channels.min(1).values.tolist()), tuple(channels.max(1).values.tolist())
        return Bounds(info.input_shape, low, high)

    def make_model(self, seed: int | None = None) -> nn.Module:
        """Build a fresh network of the run, optionally initialised from another seed."""
        return self.experiment.template(seed).module

    def one_step(self) -> Snapshot:
        """Return the same state and noise for clients that take one step on one example; the method plans for that."""
        experiment, door = self.experiment.with_steps(1, batch_size=1), self.federation.context.door
        job = _with_door(_uncharged(experiment, self.prepared, door.randomness), memory=door.memory)
        return replace(self, experiment=experiment, federation=job)

    @property
    def model(self) -> tuple[ModelFn, dict[str, Tensor]]:
        """The function that builds networks of the run, and the parameters of the global model, as attacks take them."""
        return self.make_model, self.state

    def without_defence(self) -> Snapshot:
        """Return the same state with plain local training and unprotected uploads."""
        s = self.federation
        context = replace(s.context, policy=Planner.of(Fixed(Plan()), s.setting), objective=Plain(), summed=False)
        raw = replace(s, context=context, setting=replace(s.setting, example_clip=None))
        return replace(self, federation=raw, progress=replace(self.progress, policies={}, privates={}))


def target_of(target: Path, overrides: Sequence[str]) -> tuple[Config, Path | None]:
    """Return the configuration of a file and None, or the configuration of a run directory and that directory.

    Raises:
        ConfigError: there are overrides for a run, or the directory is not that of a run.
    """
    if not target.is_dir():
        return load_config(target, overrides), None
    if overrides:
        raise ConfigError(
            f"--set does not go with a run directory, which is attacked as it was configured: attack {target / 'config.toml'} "
            "instead (settings of the attack itself, attack.NAME=VALUE, are fine)"
        )
    return load_recorded(target), target


def snapshot_of(
    experiment: Experiment,
    prepared: Prepared,
    run: Path | None = None,
    *,
    round: int | None = None,
    last: bool = False,
    seed: int = 0,
    on_round: OnRound | None = None,
) -> Snapshot:
    """Train an experiment up to a round, or load the saved models and states of a run of it.

    Args:
        round: by default 0, the first. A run saves its first and last state only: 0 or its number of finished rounds.
        last: if no round is given, use the model after the last round. seed: seed of all randomness of the attack.

    Raises:
        ConfigError: the round does not exist or was not saved.
    """
    job = uncharged(experiment, prepared, seed)
    begin = round == 0 or (round is None and not last)
    if begin:
        progress = start(job)
    elif run is None:
        progress = _trained(experiment.engine, job, job.setting.rounds if round is None else round, on_round)
    else:
        progress = _saved(run, identity(run_id_of(run), prepared, experiment.code), round)
        job = _with_door(job, memory=NoiseMemory(run / STATE_FILE).copied())
    return Snapshot(experiment, prepared, job, progress)


def _trained(spec: EngineSpec, job: Federation, until: int, on_round: OnRound | None) -> Progress:
    progress = start(job)
    if until > job.setting.rounds:
        raise ConfigError(f"--round {until}: the configuration has {job.setting.rounds} rounds; give 0 to {job.setting.rounds}")
    with engine(spec.name, job.context, spec.timeout) as workers:
        while progress.round < until:
            one_round(job, workers, progress)
            if on_round is not None:
                on_round(progress.round, until)
    return progress


def _saved(run: Path, identity: dict[str, Any], round: int | None) -> Progress:
    progress = Checkpoints(run / "checkpoint", identity).load()
    if progress is None or round not in (None, progress.round):
        end = "no finished round" if progress is None else f"round {progress.round}, the one after its end"
        raise ConfigError(f"--round {round}: {run} keeps the models of round 0 and of {end}; give one of these")
    return progress


def uncharged(experiment: Experiment, prepared: Prepared, seed: int) -> Federation:
    """Return the federation with noise from the attack's seed and a door that charges nobody."""
    randomness = Randomness(Randomness(experiment.seed).derive("attack", seed), seeded_noise=True)
    return _uncharged(experiment, prepared, randomness)


def _uncharged(experiment: Experiment, prepared: Prepared, randomness: Randomness) -> Federation:
    """Return the uncharged federation on the CPU, on any machine: an attack needs few clients, and a snapshot has CPU tensors."""
    job = federation(experiment, prepared, Path("no-ledger"), "attack")
    job = _with_door(job, ledger=NullLedger(), randomness=randomness, memory=NoiseMemory())
    return replace(job, context=replace(job.context, randomness=randomness))


def _with_door(job: Federation, **changes: Any) -> Federation:
    """Return the federation with a changed door."""
    return replace(job, context=replace(job.context, door=replace(job.context.door, **changes)))
