from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from fedveil.audit.adapter import Case
from fedveil.audit.training_audit import Trainer, pairs, supports_given_releases
from fedveil.errors import ConfigError
from fedveil.experiment.config import parse
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.papers.fedglp_adp.method import TwoLosses, grown
from fedveil.training.local import Client, Local

ROUNDS = 6


def trainer(name: str = "fedglp-adp", **privacy: Any) -> Trainer:
    configuration = parse(
        {
            "data": {"partition": {"kind": "iid", "clients": 8}},
            "model": {"name": "linear"},
            "method": {"name": name, "variant": "published"},
            "training": {"rounds": ROUNDS, "clients_per_round": 4, "batch_size": 16, "batch_clip": 1.0, "local_steps": 2},
            "privacy": {"delta": 1e-3, "epsilon": 2.0, "view": "server", **privacy},
        }
    )
    case = Case.of(*calibrated_setting(configuration), dimension=200)
    return Trainer(case, pairs(case, ROUNDS)[0], ROUNDS, case.scope)


@dataclass(frozen=True)
class RawMask:
    """TwoLosses, but the mask grows where the RAW update is large."""

    inner: TwoLosses
    name: str = field(default="raw")

    def begin(self, local: Local) -> None:
        self.inner.begin(local)

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        return self.inner.step(local, x, y)

    def finish(self, local: Local) -> Tensor:
        raw, mask = (local.model.vector - local.scratch["first"]).abs(), local.state["mask"].clone()
        noisy = self.inner.finish(local)
        share = float(local.state["mask"].float().mean())
        local.state["mask"] = grown(mask, raw, local.model.layout, share)
        return noisy


def test_masks_of_fedglp_adp_are_a_function_of_what_was_released() -> None:
    """All of the client's data are swapped: given equal releases, every round's support is the same."""
    found = supports_given_releases(trainer(), np.random.default_rng(0))
    assert [one.differs for one in found] == [0] * ROUNDS
    assert max(one.gap for one in found) < 1e-5
    assert found[-1].sent < found[0].sent  # masks did grow


def test_supports_differ_where_releases_do() -> None:
    """The same two worlds without the coupling: the test above is not empty."""
    one, rng = trainer(), np.random.default_rng(0)
    low, high = (one(world, rng).sent for world in (0, 1))
    assert low is not None
    assert high is not None
    assert np.sum(low != high) > 10


def test_a_mask_of_raw_values_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer()
    kind = type(one.case.method)
    real = kind.client

    def client(self: Any, s: Any) -> Client:
        inner = real(self, s)
        assert isinstance(inner, TwoLosses)
        return RawMask(inner)

    monkeypatch.setattr(kind, "client", client)
    found = supports_given_releases(one, np.random.default_rng(0))
    assert sum(support.differs for support in found) > 10


def test_other_mechanisms_are_refused() -> None:
    with pytest.raises(ConfigError, match="once per round"):
        supports_given_releases(trainer("aldp-fl"), np.random.default_rng(0))
    with pytest.raises(ConfigError, match="client level"):
        supports_given_releases(trainer("aldp-fl", unit="record", adjacency="replace_one"), np.random.default_rng(0))
