"""The place of an attack: a federation at the beginning of a round, with a door that charges nobody.

An attack is a simulation, so its noise comes from the attack's seed and its releases are written into no ledger.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedveil.attacks.attack_types import Bounds
from fedveil.attacks.simulate import split
from fedveil.audit.adapter import NullLedger
from fedveil.configuration.config import Config, load_config
from fedveil.engines.select_engine import engine
from fedveil.errors import ConfigError
from fedveil.federation.checkpoint import Checkpoints
from fedveil.federation.fit import one_round
from fedveil.federation.progress import Federation, Progress, start
from fedveil.release.noise import Randomness
from fedveil.release.plan import Fixed, Plan, Released
from fedveil.run.assembly import Prepared, build_model, federation, prepare
from fedveil.run.resume import identity, run_id_of
from fedveil.training.local import Plain

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedveil.data.catalogue import Info
    from fedveil.training.params import Layout

OnRound = Callable[[int, int], None]


@dataclass(frozen=True)
class Scene:
    """A federation at the beginning of round `progress.round`, and what is public about it."""

    config: Config
    prepared: Prepared
    federation: Federation
    progress: Progress

    @property
    def info(self) -> Info:
        """Of the data set."""
        return self.prepared.dataset.info

    @property
    def layout(self) -> Layout:
        """Of the model."""
        return self.federation.context.door.layout

    @property
    def summed(self) -> bool:
        """Whether uploads are added before anyone sees them."""
        return self.federation.context.summed

    @property
    def released(self) -> Released:
        """What everyone has when the round begins."""
        return Released(self.progress.round, self.progress.model, self.progress.previous)

    @property
    def state(self) -> dict[str, Tensor]:
        """The global model by parameter."""
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        return split(self.progress.model, {k: torch.empty(shape) for k, shape in shapes.items()})

    @cached_property
    def bounds(self) -> Bounds:
        """The box of the data: pixels from 0 to 1; for signals the range of the public test examples, per channel."""
        info, (x, _) = self.info, self.federation.test
        if len(info.input_shape) == 3:
            low = tuple(-m / s for m, s in zip(info.mean, info.std, strict=True))
            return Bounds(info.input_shape, low, tuple((1 - m) / s for m, s in zip(info.mean, info.std, strict=True)))
        channels = x.transpose(0, 1).flatten(1)
        low, high = tuple(channels.min(1).values.tolist()), tuple(channels.max(1).values.tolist())
        return Bounds(info.input_shape, low, high)

    def make_model(self) -> nn.Module:
        """A fresh network of the run."""
        return build_model(self.config, self.prepared).module

    def without_defence(self) -> Scene:
        """The same place with plain local training, and uploads that leave as they are."""
        s = self.federation
        context = replace(s.context, policy=Fixed(Plan()), objective=Plain(), summed=False)
        raw = replace(s, context=context, setting=replace(s.setting, example_clip=None))
        return replace(self, federation=raw, progress=replace(self.progress, policies={}, privates={}))


def scene_of(
    target: Path, overrides: Sequence[str], round: int | None, seed: int, last: bool = False, on_round: OnRound | None = None
) -> Scene:
    """The scene in a configuration (which is trained up to the round) or a run directory (which is only read).

    Args:
        round: 0, the first, unless given. A run keeps its beginning and its end only: 0 or its number of finished rounds.
        last: by default the model after the last round instead. seed: of everything random in the attack.

    Raises:
        ConfigError: a round that there is not, overrides for a run, or a run whose data the configuration does not make.
    """
    if not target.is_dir():
        return scene_of_config(load_config(target, overrides), round, seed, last, on_round)
    if overrides:
        raise ConfigError(
            f"--set does not go with a run directory, which is attacked as it was configured: attack {target / 'config.toml'} "
            "instead (settings of the attack itself, attack.NAME=VALUE, are fine)"
        )
    return _of_run(target, round, seed, last)


def scene_of_config(
    config: Config, round: int | None = None, seed: int = 0, last: bool = False, on_round: OnRound | None = None
) -> Scene:
    """The scene of a configuration, trained up to the round; arguments and errors as `scene_of`."""
    job, prepared = uncharged(config, seed)
    rounds = job.setting.rounds
    until = round if round is not None else (rounds if last else 0)
    if until > rounds:
        raise ConfigError(f"--round {until}: the configuration has {rounds} rounds; give 0 to {rounds}")
    progress = start(job)
    if until:
        with engine(config.run.engine, job.context, config.training.client_timeout) as workers:
            while progress.round < until:
                one_round(job, workers, progress)
                if on_round is not None:
                    on_round(progress.round, until)
    return Scene(config, prepared, job, progress)


def configured(run: Path) -> Config:
    """The configuration of a run directory.

    Raises:
        ConfigError: not a run directory, or one whose data the configuration does not make.
    """
    try:
        given = json.loads((run / "partition.json").read_text())["given"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{run} is not a run directory with a readable partition.json: {error}") from None
    if given:
        raise ConfigError(
            f"the data or the partition of {run} were handed over by a program: its configuration does not make them"
        )
    return load_config(run / "config.toml")


def _of_run(run: Path, round: int | None, seed: int, last: bool) -> Scene:
    config = configured(run)
    job, prepared = uncharged(config, seed)
    if round == 0 or (round is None and not last):
        return Scene(config, prepared, job, start(job))
    progress = Checkpoints(run / "checkpoint", identity(run_id_of(run), prepared, config.run.plugins)).load()
    if progress is None or round not in (None, progress.round):
        end = "no finished round" if progress is None else f"round {progress.round}, the one after its end"
        raise ConfigError(f"--round {round}: {run} keeps the models of round 0 and of {end}; give one of these")
    return Scene(config, prepared, job, progress)


def uncharged(config: Config, seed: int) -> tuple[Federation, Prepared]:
    """The configured federation with its noise from the attack's seed and a door that charges nobody."""
    prepared = prepare(config)
    job = federation(config, prepared, Path("no-ledger"), "attack")
    randomness = Randomness(Randomness(config.run.seed).derive("attack", seed), seeded_noise=True)
    door = replace(job.context.door, ledger=NullLedger(), randomness=randomness)
    return replace(job, context=replace(job.context, door=door, randomness=randomness)), prepared
