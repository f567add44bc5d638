"""Secure aggregation over the wire: the bits of `simulate`, whoever vanishes; no attempt is answered twice or uncharged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from federation_runs import bits, config
from fedveil.experiment.run import run
from joined_clients import ROSTER, Machines, consent, served

CLIENTS, ROUNDS = 4, 3


def masked(secure_aggregation: str = "on", rounds: int = ROUNDS, seeded: bool = True, **privacy: Any) -> Any:
    """A run of four clients with noise in shares."""
    return config(
        {"name": "dp-fedavg"},
        "aggregate",
        data={"partition": {"kind": "iid", "clients": CLIENTS}},
        training={"clients_per_round": CLIENTS, "local_steps": 1, "rounds": rounds},
        privacy={"noise_place": "shares", "min_survivors": 3, **privacy},
        run={"seeded_noise": seeded, "secure_aggregation": secure_aggregation},
    )


def machines(folder: Path, **changes: Any) -> Machines:
    pinned = {"roster": ROSTER.digest.hex(), "secure_aggregation": "required", **changes}
    return Machines(folder, {number: consent(number, **pinned) for number in range(CLIENTS)}, restarts=False)


def attempts(folder: Path, number: int | None = None) -> list[dict[str, Any]]:
    """The attempts that the server has named, or that a client has answered."""
    path = folder / "run/private/attempts.jsonl"
    if number is not None:
        (path,) = (folder / "clients" / str(number) / "runs").glob("*/attempts.jsonl")
    return [row for row in map(json.loads, path.read_text().splitlines()) if "attempt" in row]


def test_the_model_is_that_of_masks_in_one_process(tmp_path: Path) -> None:
    result, _ = served(masked(), tmp_path / "run", machines(tmp_path / "clients"))
    alone = run(masked("simulate"), tmp_path / "alone")
    assert bits(result.model.vector) == bits(alone.model.vector)
    assert [row["participants"] for row in result.history] == [CLIENTS] * ROUNDS
    for number in range(CLIENTS):
        assert [row["set"] for row in attempts(tmp_path, number)] == [row["set"] for row in attempts(tmp_path)]
