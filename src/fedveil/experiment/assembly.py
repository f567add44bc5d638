"""Assembly of a run from an experiment: data, model, method, door."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedveil.accounting.types import Unit, View
from fedveil.data.dataset import strata
from fedveil.data.load import load
from fedveil.data.partition import checked_options, from_options, need_strata
from fedveil.data.split import client_test_split, public_split, split_within_users
from fedveil.errors import ConfigError, DataError
from fedveil.experiment.experiment import isolation_here
from fedveil.experiment.public_setting import Population, by_own_clients, require_handed_over
from fedveil.experiment.shared_budget import budgets
from fedveil.experiment.single_examples import packs
from fedveil.federation.clients import Clients
from fedveil.federation.progress import Federation
from fedveil.federation.round import Context
from fedveil.federation.shared_sums import SimulatedMasks
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.mechanism.mechanisms import STATE_FILE, NoiseMemory
from fedveil.methods.method import extras_of, is_user_defined, participation_of
from fedveil.methods.run_cost import check_declared
from fedveil.methods.setting import Setting
from fedveil.models.probe import needs_pairs
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.tasks.task import Task
from fedveil.training.local import LocalSpec
from fedveil.training.params import FlatModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedveil.data.catalogue import Info
    from fedveil.data.dataset import Dataset
    from fedveil.data.partition import Partition
    from fedveil.experiment.experiment import DataSpec, Experiment


@dataclass(frozen=True)
class Prepared:
    """Prepared data: the clients' training and test examples, the public test set and the public split.

    declared: public facts about clients whose data are partly elsewhere, in runs over several machines.
    """

    dataset: Dataset
    partition: Partition
    clients: Clients
    client_tests: Clients | None
    test: tuple[torch.Tensor, torch.Tensor]
    public: tuple[torch.Tensor, torch.Tensor] | None
    declared: Population | None = None

    @property
    def population(self) -> Population:
        """Return the public facts about these clients."""
        if self.declared is not None:
            return self.declared
        clients = len(self.clients)
        return Population(self.dataset.info, clients, max(1, round(len(self.clients.y) / max(clients, 1))))


def prepare(spec: DataSpec, dataset: Dataset | None = None, partition: Partition | None = None) -> Prepared:
    """Load and partition the data, unless a program passes them in; convert them to tensors once.

    Raises:
        ConfigError, DataError: as `load` and `from_options`; or a program passed in data before and does not now; or its
            partition fails `Partition.checked`, or gives public examples to clients.
    """
    section, seed = spec.section if dataset is None else by_own_clients(spec.section, dataset), spec.seed
    require_handed_over(section, dataset, partition)
    if dataset is None:
        source = section.source
        dataset = load(section.name, section.data_dir, section.download) if source is None else source.read(section.name)
    _refuse_timed(spec.unit, dataset, section.partition.get("kind") if partition is None else partition.kind)
    if (features := spec.features) is not None:
        dataset = features.of(dataset)
    if partition is None and section.partition.get("kind") == "users" and dataset.users_test is not None:
        dataset = split_within_users(dataset, section.user_test_fraction)
    check_targets(spec.task, dataset)
    among, public_part = None, np.empty(0, dtype=np.int64)
    by_user = section.partition.get("kind") == "users" and dataset.users_train is not None
    if section.public_fraction:
        users = dataset.users_train if by_user else None
        among, public_part = public_split(len(dataset.y_train), seed=seed, fraction=section.public_fraction, users=users)
    if partition is None:
        options = checked_options(section.partition)
        need_strata(dataset.info, options)
        partition = from_options(
            options, strata(dataset.info, dataset.y_train), seed=seed, users=dataset.users_train, among=among
        )
    elif shared := int(np.isin(partition.checked(len(dataset.y_train)), public_part).sum()):
        raise ConfigError(
            f"the partition that you passed in gives clients {shared} of the {len(public_part)} examples that "
            f"data.public_fraction = {section.public_fraction:g} makes public: leave out what fedveil.data.split.public_split(n, "
            f"seed={seed}, fraction={section.public_fraction:g}{', users=data.users_train' * by_user})[1] gives of the "
            f"n = {len(dataset.y_train)} training examples"
        )
    x, y = dataset.standardise(dataset.x_train), dataset.y_train
    tests = None
    if section.client_test_fraction:
        partition, test_parts = client_test_split(partition, section.client_test_fraction, seed=seed)
        tests = Clients.of(x, y, test_parts)
    public = (torch.from_numpy(x[public_part]), torch.from_numpy(y[public_part])) if len(public_part) else None
    test = torch.from_numpy(dataset.standardise(dataset.x_test)), torch.from_numpy(dataset.y_test)
    return Prepared(dataset, partition, Clients.of(x, y, partition.clients), tests, test, public)


def _refuse_timed(unit: Unit, dataset: Dataset, kind: object) -> None:
    """Refuse a split in which one record's time decides on what others are trained: neighbouring data would differ in more.

    If records are protected, a share of the latest records compares their times. If clients are made by dividing the training
    examples, a record that moves to the test set shifts later records to other clients, whatever is protected.
    """
    origin = dataset.origin
    if origin is None or not origin.timed:
        return
    if unit is Unit.RECORD and origin.ranked:
        raise ConfigError(
            f"privacy.unit = 'record', and the test split ({origin.test}) ranks records by their times, so that one "
            f"record decides whether another one is trained on: use test={{'latest': ..., 'since': ...}} or test={{'share': ...}}"
        )
    if kind != "users":
        raise ConfigError(
            f"the test split ({origin.test}) goes by times, and the clients are made by dealing out what it leaves for training "
            f"(data.partition.kind = {kind!r}), so that one record's time decides which examples "
            f"other clients get: name the clients (client=..., data.partition.kind = 'users'), or use test={{'share': ...}} or "
            f"test data of their own"
        )


def public_examples(prepared: Prepared) -> tuple[torch.Tensor, torch.Tensor]:
    """Return four public examples by position, of different classes if possible: a test set may be sorted by class.

    Without a test set they are made up.
    """
    x, y = prepared.test if len(prepared.test[1]) else map(torch.from_numpy, placeholders(prepared.dataset.info, 4))
    first = np.unique(y.numpy(), return_index=True)[1] if y.dim() == 1 else np.empty(0, np.int64)
    chosen = torch.cat([torch.from_numpy(np.sort(first)), torch.arange(4) % len(y)])[:4]
    return x[chosen], y[chosen]


def placeholders(info: Info, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return made-up inputs and targets: zeros."""
    x = np.zeros((count, *info.input_shape), "int64" if info.vocabulary else "float32")
    return x, np.zeros((count, *info.target.shape), info.target.dtype)


def spec_for(setting: Setting, model: FlatModel, x: torch.Tensor, y: torch.Tensor) -> LocalSpec:
    """Return the specification of local training, with settings that the network needs, as determined on public examples."""
    pairs = setting.example_clip is None and needs_pairs(model, x, y, setting.task)
    loop = setting.local.loop or (setting.example_clip is not None and packs(model, x))
    return replace(setting.local, pairs=pairs, loop=loop)


def federation(
    experiment: Experiment,
    prepared: Prepared,
    ledger: Path,
    run: str,
    network: tuple[FlatModel, LocalSpec] | None = None,
    population: BudgetedLedger | None = None,
) -> Federation:
    """Build everything that a run of this experiment needs.

    Args:
        ledger: file to which releases are charged, under the name `run`.
        network: as returned by `rehearsed`, moved to its device; by default it is built for the CPU, and not rehearsed.
        population: ledger of the shared budget; by default nothing is charged to one.
    """
    method, setting = experiment.method, experiment.setting
    if network is None:
        untried = experiment.template()
        network = untried, spec_for(setting, untried, *public_examples(prepared))
    model, local = network
    planner = check_declared(method, setting, model.vector.to("cpu"))
    randomness = Randomness(experiment.seed, experiment.seeded_noise)
    door = Door(
        model.layout,
        setting.scope,
        run,
        BudgetedLedger(ledger, budgets(method, setting), experiment.seeded_noise, population=population),
        randomness,
        rate=setting.rate if setting.amplified else None,
        max_norm=experiment.max_update_norm,
        colluders=setting.colluders,
        extras=extras_of(method, setting),
        memory=NoiseMemory(ledger.with_name(STATE_FILE)),
        bits=setting.grid_bits,
    )
    user_defined = model.has_user_code or setting.task.is_user_defined or is_user_defined(method)
    context = Context(
        model,
        prepared.clients,
        local,
        experiment.client,
        planner,
        door,
        randomness,
        setting.scope.view is not View.SERVER,
        model.buffers(),
        task=setting.task,
        evaluation=setting.evaluation,
        tests=prepared.client_tests,
        isolation=isolation_here(experiment.isolation, experiment.engine.name) if user_defined else "none",
        in_shares=setting.noise_place == "shares",
    )
    masks = None
    if setting.secure_aggregation == "simulate":
        masks = SimulatedMasks.of(context, setting, run, repr(experiment.written))
    return Federation(
        setting,
        method,
        context,
        prepared.test,
        randomness,
        None if experiment.engine.name == "flower" else prepared.client_tests,  # with Flower, clients score their own tests
        setting.server,
        experiment.evaluate_every,
        prepared.public,
        participation_of(method, setting),
        masks=masks,
    )


def check_targets(task: Task, dataset: Dataset) -> None:
    """Refuse targets of another kind than the task's, or with values that the task cannot interpret."""
    if type(task).wrong_targets is not Task.wrong_targets:  # the base class assumes the right shape and type
        task.check(dataset.info)
    for split, target in (("train", dataset.y_train), ("test", dataset.y_test)):
        if wrong := task.wrong_targets(target):
            raise DataError(f"{dataset.info.name}, {split} split: task.name = {task.name!r} cannot learn from {wrong}")
