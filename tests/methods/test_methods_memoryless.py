"""Clients whose type has no memory keep nothing of one round for the next, so that a sample counts as drawn afresh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from torch import Tensor

from federation_runs import config, every_method, job
from fedveil.executors.inline import Inline
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.federation.fit import fit
from fedveil.federation.progress import start
from fedveil.training.local import Local, Plain, remembers

PROVEN = {name: c for name, c in every_method() if name.endswith("aggregate") and "published" not in name}
REMEMBER = {"scaffold", "dp-scaffold", "fedglp-adp", "fed-dpa", "fed-addp"}


@pytest.mark.parametrize("name", PROVEN)
def test_these_methods_have_clients_that_remember(name: str) -> None:
    method, s = calibrated_setting(PROVEN[name])
    assert remembers(method.client(s)) == (method.name in REMEMBER)


@dataclass(frozen=True)
class Keeps(Plain):
    """Plain training that tries to keep something, of no type that may."""

    def finish(self, local: Local) -> Tensor:
        local.state["update"] = super().finish(local)
        return local.state["update"]


def test_a_client_without_a_memory_cannot_keep_anything(tmp_path: Path) -> None:
    run = job(config({"name": "dp-fedavg"}), tmp_path)
    run = replace(run, context=replace(run.context, objective=Keeps()))
    progress = start(run)
    assert fit(run, Inline(run.context), progress).startswith("every client of a round failed")
    assert not progress.privates
    assert all("does not support item assignment" in why for row in progress.history for why in row["failures"].values())
