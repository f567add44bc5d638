"""What a client sends and counts follows from its own examples alone, to the bit, wherever they lie in memory.

Matrix products may round by the address of what they read, and nine numbers of 4 bytes are no multiple of what processors read at
once: digits, with 64, would show nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedveil as fv
from federation_runs import every_method
from fedveil.experiment.assembly import federation
from fedveil.experiment.config import Config
from fedveil.experiment.data_card import HandedOver, recorded
from fedveil.experiment.resolve import opened
from fedveil.federation.clients import Clients
from fedveil.federation.round import ClientTask, Context, trained
from fedveil.ledger.ledger import Ledger
from fedveil.mechanism.plan import Released

CLIENTS, EACH, FEATURES = 20, 20, 9
DATA = {"name": "digits", "partition": {"kind": "users"}, "client_test_fraction": 0.4}


def data() -> fv.Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(CLIENTS * EACH, FEATURES)).astype(np.float32)
    y, users = rng.integers(0, 2, len(x)), np.repeat(np.arange(CLIENTS), EACH)
    return fv.from_arrays(x, y, client=users, test=(x[:4], y[:4]), classes=2, name="own")


def methods() -> Iterator[tuple[str, dict[str, object], Config]]:
    for name, configuration in every_method():
        if name.endswith("aggregate") and "published" not in name:
            yield name, configuration.method.model_dump(exclude_unset=True), configuration
    shares = {"name": "blur-lus", "drop": 0.3, "score": "effect"}
    yield "blur-lus by effect", shares, next(c for n, c in every_method() if n.startswith("dp-fedavg"))


def fewer(clients: Clients, lost: int) -> Clients:
    """The same clients, of whom the first has so many examples less; all others' lie elsewhere in memory."""
    offsets = np.where(np.arange(len(clients.offsets)) > 0, clients.offsets - lost, 0)
    return replace(clients, x=clients.x[lost:].clone(), y=clients.y[lost:].clone(), offsets=offsets)


def outcomes(context: Context, task: ClientTask) -> dict[str, torch.Tensor]:
    work = trained(context, task, task.common)
    return {"update": work.update, **work.extras}


@pytest.mark.few(12)
@pytest.mark.parametrize(("method", "like"), [pytest.param(m, c, id=name) for name, m, c in methods()])
def test_a_client_less_examples_moves_nobody_else(method: dict[str, object], like: Config, tmp_path: Path) -> None:
    training = like.training.model_dump(exclude_unset=True) | {"rounds": 1, "optimizer": {"lr": 1.0}}
    training["clients_per_round"] = CLIENTS
    privacy, run = like.privacy.model_dump(exclude_unset=True), {"seeded_noise": True}
    config = fv.configure(data=DATA, model="linear", method=method, training=training, privacy=privacy, run=run)
    own = data()
    config = recorded(config, HandedOver(own))
    Ledger.create(tmp_path / "ledger.sqlite", "run", {}).close()
    context = federation(*opened(config, own), tmp_path / "ledger.sqlite", "run").context
    released = Released(0, context.model.vector.clone(), None)
    plan = context.plan(released, context.policy.start())
    assert context.tests is not None
    fewer_of_the_first = [
        replace(context, clients=fewer(context.clients, lost), tests=fewer(context.tests, lost)) for lost in (1, 2)
    ]
    for client in range(1, CLIENTS):
        task = ClientTask(client, released, 1.0, common=plan)
        one = outcomes(context, task)
        for other in fewer_of_the_first:
            two = outcomes(other, task)
            assert all(torch.equal(one[name], two[name]) for name in one), client


def test_a_clients_examples_begin_where_a_tensor_begins() -> None:
    clients = Clients(torch.randn(11, FEATURES), torch.zeros(11), np.array([0, 3, 5, 11]))
    for client in range(3):
        x, y = clients.examples(client)
        assert x.data_ptr() % 64 == y.data_ptr() % 64 == 0
        assert x.untyped_storage().nbytes() == x.nbytes
