"""What an objective of one's own measures of private states is private under every name, and whatever fails there ends no run."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedveil as fv
import method_kit as h
from fedveil.federation.plain_state import is_storable
from fedveil.methods.dp_fedavg import DPFedAvg
from fedveil.training.local import Local, Plain, State

SECRETS = (0.5, 9.0)
"""What client 0 holds, in two worlds that differ in nothing else."""


@dataclass(frozen=True)
class Seen(Plain):
    """Plain training that keeps the client's secret, and does with it as `mode` says."""

    mode: str = ""
    secret: float = 0.0

    def finish(self, local: Local) -> Tensor:
        held = self.secret if local.client == 0 else 0.0
        local.state["held"] = np.complex64(1) if self.mode == "state" and held > 5 else held
        return super().finish(local)

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        held = state["held"]
        return {
            "names": lambda: {"test_largest": held, "clip": held, "test_accuracy": held, "largest": held},
            "raise": lambda: {"root": math.sqrt(5 - held)},
            "keys": lambda: {"largest": held} | ({"more": 1.0} if held > 5 else {}),
            "lengths": lambda: {"largest": [held] * (2 if held > 5 else 1)},
            "texts": lambda: {"largest": "x" if held > 5 else 1.0},
        }.get(self.mode, dict)()

    def personal(self, model: Tensor, state: State) -> Tensor:
        if self.mode == "personal" and state["held"] > 5:
            raise ValueError("secret")
        return model


def runs(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A finished run in each world."""
    options = ("data.client_test_fraction=0.3", "training.clients_per_round=12", "run.engine=inline", "privacy.epsilon=8")
    config = h.digits({"name": "dp-fedavg"}, *options)
    for secret in SECRETS:
        monkeypatch.setattr(DPFedAvg, "objective", lambda self, s, secret=secret: Seen(mode=mode, secret=secret))
        result = fv.train(config, tmp_path / f"{secret:g}")
        assert result.privacy.proven.epsilon < 9
    return [tmp_path / f"{secret:g}" for secret in SECRETS]


@pytest.mark.parametrize("mode", ["raise", "keys", "lengths", "texts", "personal", "state"])
def test_what_fails_on_one_clients_state_ends_no_run(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = []
    for path in runs(mode, tmp_path, monkeypatch):
        rows = list(csv.DictReader((path / "history.csv").read_text().splitlines()))
        public.append((list(rows[0]), len(rows), sorted(json.loads((path / "summary.json").read_text())["final"])))
    assert public[0] == public[1]


def test_private_figures_take_no_public_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, secret in zip(runs("names", tmp_path, monkeypatch), SECRETS, strict=True):
        mean = secret / 12
        final = json.loads((path / "summary.json").read_text())["final"]
        columns = next(csv.reader((path / "history.csv").read_text().splitlines()))
        assert not {"test_largest", "largest", "objective_clip", "objective_test_accuracy"} & {*final, *columns}
        assert final["clip"] == 1.0
        assert final["test_accuracy"] != pytest.approx(mean)
        whole: dict[str, Any] = json.loads((path / "private" / "summary.json").read_text())["final"]
        names = ("test_largest", "largest", "objective_clip", "objective_test_accuracy")
        assert [whole[name] for name in names] == pytest.approx([mean] * 4)


@pytest.mark.parametrize(
    "value",
    [np.complex64(1), np.longdouble(1), np.datetime64("2026-01-01"), torch.zeros(2, dtype=torch.complex128), 10**5000],
    ids=lambda value: type(value).__name__,
)
def test_state_that_no_checkpoint_can_hold_is_refused_where_it_is_made(value: Any) -> None:
    from fedveil.federation.round import _is_plain

    state = {"x": [value]}
    assert not (_is_plain(state) and is_storable(state))
    kept = {"x": [1, True, "a", None, np.float32(2), np.int64(3), torch.zeros(2, dtype=torch.bfloat16)]}
    assert _is_plain(kept) and is_storable(kept)  # noqa: PT018
