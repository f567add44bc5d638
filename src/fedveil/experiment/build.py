"""From a configuration to everything a run needs: data, model, method, door."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.data.load import load
from fedveil.data.partition import checked_options, from_options
from fedveil.data.split import client_test_split, public_split, split_within_users
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config, method_of, setting_of
from fedveil.federation.clients import Clients
from fedveil.federation.fit import Federation
from fedveil.federation.round import Context
from fedveil.methods.base import Method, Setting
from fedveil.models import registry as models
from fedveil.params import FlatModel
from fedveil.privacy.budget import Budget, budget_for
from fedveil.privacy.types import View
from fedveil.release.door import Door
from fedveil.release.noise import Randomness

if TYPE_CHECKING:
    from fedveil.data.dataset import Dataset
    from fedveil.data.partition import Partition
    from fedveil.privacy.ledger import Ledger


@dataclass(frozen=True)
class Prepared:
    """Data dealt out to clients: training examples, each client's own test examples, the public test set and public split."""

    dataset: Dataset
    partition: Partition
    clients: Clients
    client_tests: Clients | None
    test: tuple[torch.Tensor, torch.Tensor]
    public: tuple[torch.Tensor, torch.Tensor] | None


def prepare(config: Config) -> Prepared:
    """Load the data and deal them out; tensors are made once."""
    section, seed = config.data, config.run.seed
    options = checked_options(section.partition)
    dataset = load(section.name, section.data_dir, section.download)
    if section.partition.get("kind") == "users" and dataset.users_test is not None:
        dataset = split_within_users(dataset, section.user_test_fraction)
    among, public_part = None, np.empty(0, dtype=np.int64)
    if section.public_fraction:
        among, public_part = public_split(len(dataset.y_train), seed=seed, fraction=section.public_fraction)
    dealt = from_options(options, dataset.y_train, seed=seed, users=dataset.users_train, among=among)
    x, y = dataset.standardise(dataset.x_train), dataset.y_train
    tests = None
    if section.client_test_fraction:
        dealt, own = client_test_split(dealt, section.client_test_fraction, seed=seed)
        tests = Clients.of(x, y, own)
    public = (torch.from_numpy(x[public_part]), torch.from_numpy(y[public_part])) if len(public_part) else None
    test = torch.from_numpy(dataset.standardise(dataset.x_test)), torch.from_numpy(dataset.y_test)
    return Prepared(dataset, dealt, Clients.of(x, y, dealt.clients), tests, test, public)


def build_model(config: Config, prepared: Prepared) -> FlatModel:
    """The configured network, initialised from the run's seed."""
    options = dict(config.model)
    name, info = str(options.pop("name", "mlp")), prepared.dataset.info
    return FlatModel(models.build(name, info.input_shape, info.classes, Randomness(config.run.seed).derive("model"), **options))


def calibrated_setting(config: Config) -> tuple[Method, Setting]:
    """Method and setting with the noise known; checks what makes no sense before anything is trained."""
    method = method_of(config)
    return method, method.calibrate(setting_of(config))


def federation(config: Config, prepared: Prepared, ledger: Ledger, run: str) -> Federation:
    """Everything that a run of this configuration needs, with its releases charged to `ledger`."""
    method, setting = calibrated_setting(config)
    if len(prepared.clients) != setting.clients:
        raise ConfigError(f"the data give {len(prepared.clients)} clients, the configuration says {setting.clients}")
    model = build_model(config, prepared)
    randomness = Randomness(config.run.seed, config.run.seeded_noise)
    door = Door(
        model.layout,
        setting.scope,
        run,
        ledger,
        randomness,
        rate=setting.rate if setting.sampling == "poisson" else None,
        budget=budgets(method, setting),
        max_norm=config.training.max_update_norm,
    )
    context = Context(
        model,
        prepared.clients,
        setting.local,
        method.objective(setting),
        method.policy(setting),
        door,
        randomness,
        setting.scope.view is not View.SERVER,
        model.buffers(),
    )
    return Federation(
        setting,
        method,
        context,
        prepared.test,
        prepared.client_tests,
        config.training.server_optimizer.spec(),
        config.training.evaluate_every,
    )


def budgets(method: Method, setting: Setting) -> Callable[[int], Budget] | None:
    """The budget of each client (server view) or of the whole run, preset from the planned releases; None promises nothing."""
    planned = method.releases(setting, setting.scope.view)
    made: dict[int, Budget] = {}

    def of(client: int) -> Budget:
        if client not in made:
            made[client] = budget_for(planned, setting.epsilon, setting.delta)
        return made[client]

    return None if any(type(e).__name__ == "Unbounded" for e in planned) else of


def new_run_id() -> str:
    """A name no other run has."""
    return uuid.uuid4().hex[:12]
