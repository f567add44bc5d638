"""Global sensitivity as the Noisy-FedAvg paper measures it, by two coupled runs on data that differ in one client.

Both have the same noise, batches and engine: `cuda` or `batched` if configured, else `inline`.

It measures one pair of neighbours in a simulation and bounds nothing, since another pair may be further apart.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

import fedveil.experiment.run_directory as rundir
from fedveil.attacks.neighbours import other_targets
from fedveil.errors import ConfigError
from fedveil.executors.select_engine import device_for, engine
from fedveil.experiment.assembly import Prepared, federation
from fedveil.experiment.config import Config
from fedveil.experiment.data_card import HandedOver, reopened
from fedveil.experiment.experiment import EngineSpec, Experiment
from fedveil.experiment.public_values import TOGETHER
from fedveil.experiment.rehearsal import rehearsed
from fedveil.experiment.resolve import opened
from fedveil.experiment.run_directory import write_history
from fedveil.federation.clients import Clients
from fedveil.federation.fit import one_round
from fedveil.federation.progress import start
from fedveil.ledger.ledger import Ledger
from fedveil.training.cores import process_state

if TYPE_CHECKING:
    from fedveil.data.dataset import Dataset
    from fedveil.data.partition import Partition
    from fedveil.federation.history import Record, Row
    from fedveil.federation.progress import Federation

Change = Literal["record", "labels", "absent"]


@process_state()
def twin_sensitivity(
    config: Config | str | Path,
    client: int,
    change: Change = "record",
    *,
    data: Dataset | None = None,
    partition: Partition | None = None,
) -> list[float]:
    """Return ||w_t - w'_t|| after each round t = 1 .. T of coupled runs, with equal noise, batch order and client sampling.

    Args:
        config: a configuration, or a run directory, whose data are then checked. client: the client whose data differ.
        change: `record` replaces its first example by the first test example; `labels` changes each of its labels to the next
            class; `absent` removes its data, so that it contributes zero.
        data, partition: replacements of the configured ones.

    Raises:
        ConfigError: the client does not exist or has no data, or the data are not those of the run.

    Source: the Noisy-FedAvg paper, Section 5, "Sensitivity", with the neighbours of its Definition 1, which differ in one sample.
    """
    return twin_runs(config, client, change, data=data, partition=partition)[0]


@process_state()
def twin_runs(
    config: Config | str | Path,
    client: int,
    change: Change = "record",
    *,
    data: Dataset | None = None,
    partition: Partition | None = None,
    on_round: Callable[[Row], None] | None = None,
) -> tuple[list[float], list[Row]]:
    """Return the distances of `twin_sensitivity`, and the history of the unchanged run with a column `sensitivity`."""
    if isinstance(config, Config):
        experiment, prepared = opened(config, data, partition)
    else:
        experiment, prepared = reopened(Path(config), HandedOver(data, partition))
    distances, history = _twins(experiment, prepared, neighbour(prepared, client, change), on_round)
    return distances, [dict(record) for record in history]


@process_state()
def twin_directory(config: Config, client: int, change: Change, out: Path, on_round: Callable[[Row], None] | None = None) -> Path:
    """Run twins and write a directory whose `private/history.csv` has `sensitivity`, for `fedveil plot` and `fedveil report`.

    It has no ledger and no model, since it measures a simulation and cannot be resumed.

    Raises:
        ConfigError: for the reasons of `twin_sensitivity`, or if `out` exists and is not empty.
    """
    experiment, prepared = opened(config)
    other = neighbour(prepared, client, change)
    rundir.create(out)
    rundir.write_config(out / "config.toml", experiment.written)
    _, history = _twins(experiment, prepared, other, on_round)
    write_history(out, history, experiment.setting.layout)
    ended = {"rounds": len(history), "ended": "after its last round"}
    rundir.write_json(out / "summary.json", {"twin": {"client": client, "change": change}, **ended})
    return out


def _twins(
    experiment: Experiment, prepared: Prepared, other: Clients, on_round: Callable[[Row], None] | None
) -> tuple[list[float], list[Record]]:
    spec = experiment.engine
    spec = spec if spec.name in TOGETHER else replace(spec, name="inline")
    experiment = replace(experiment, engine=spec, seeded_noise=True)  # both runs need the same noise
    with tempfile.TemporaryDirectory() as folder:
        first, second = (_job(experiment, prepared, Path(folder) / name) for name in ("first", "second"))
        second = replace(second, context=replace(second.context, clients=other))
        return _distances(spec, first, second, on_round)


def neighbour(prepared: Prepared, client: int, change: Change) -> Clients:
    """Return the clients of the neighbouring data set (see `twin_sensitivity`)."""
    clients = prepared.clients
    if not 0 <= client < len(clients):
        raise ConfigError(f"client = {client}: there are clients 0 to {len(clients) - 1}")
    low, high = int(clients.offsets[client]), int(clients.offsets[client + 1])
    if low == high:
        raise ConfigError(f"client {client} has no data that could differ: choose another")
    x, y = clients.x.clone(), clients.y.clone()
    if change == "labels":
        y[low:high] = other_targets(y[low:high], prepared.dataset.info.classes)
    elif change == "record":
        x[low], y[low] = prepared.test[0][0], prepared.test[1][0]
    else:
        rest = torch.cat([torch.arange(low), torch.arange(high, len(y))])
        offsets = np.where(np.arange(len(clients.offsets)) > client, clients.offsets - (high - low), clients.offsets)
        return Clients(x[rest], y[rest], offsets)
    return Clients(x, y, clients.offsets)


def _job(experiment: Experiment, prepared: Prepared, folder: Path) -> Federation:
    """Return one of the two runs. Each has its own folder, since the state of correlated noise is stored with the ledger."""
    folder.mkdir()
    Ledger.create(folder / "ledger.sqlite", "twin", {}).close()
    model, local = rehearsed(experiment, prepared)
    network = model.to(device_for(experiment.engine.name)), local
    job = federation(experiment, prepared, folder / "ledger.sqlite", "twin", network)
    return replace(job, client_tests=None, evaluate_every=experiment.setting.rounds)


def _distances(
    spec: EngineSpec, first: Federation, second: Federation, on_round: Callable[[Row], None] | None
) -> tuple[list[float], list[Record]]:
    one, two = start(first), start(second)
    distances = []
    made = partial(engine, spec.name, at_once=spec.at_once, deterministic=spec.deterministic)
    with made(first.context) as here, made(second.context) as there:
        for _ in range(first.setting.rounds):
            one_round(first, here, one)
            one_round(second, there, two)
            distances.append(float((one.model.double() - two.model.double()).norm()))
            one.history[-1].private["sensitivity"] = distances[-1]
            if on_round is not None:
                on_round(dict(one.history[-1]))
    return distances, one.history
