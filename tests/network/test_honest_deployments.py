"""Honest deployments of many kinds, drawn by a number: none is contradicted, by itself or against a client's ledger."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation_runs import config as base
from federation_runs import every_method
from fedveil.accounting.types import Unbounded
from fedveil.deploy.consent import Consent
from fedveil.deploy.demo_network import consent_to
from fedveil.deploy.deployed_data import public_part
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config, configure
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.experiment.resolve import resolve
from fedveil.experiment.shared_budget import planned_charges
from fedveil.experiment.two_ledgers import compared
from fedveil.experiment.verification import verification
from fedveil.ledger.ledger import Ledger
from joined_clients import Machines, consent, served
from kill_points import SERVER, kill_at

TWO = {"rounds": 2, "clients_per_round": 2, "local_steps": 1}
KINDS = ("digits", "table", "table-of-classes", "quantities")


@cache
def all_methods() -> list[Config]:
    return [configured for _, configured in every_method()]


def deployable(config: Config) -> bool:
    """Whether clients on machines of their own can agree to it, which is known before anything is begun."""
    try:
        public_part(resolve(config))
        consent_to(config, 0)
    except ConfigError:
        return False
    return not any(isinstance(event, Unbounded) for event in planned_charges(*calibrated_setting(config)))


def tables(folder: Path, rng: random.Random, kind: str, clients: int) -> dict[str, Any]:
    """A file for each client and one of the server, and the section that describes them."""
    own = np.random.default_rng(rng.randrange(2**32))
    sizes = [rng.choice([1, 7, 30, 60]) for _ in range(clients)]
    classes = {"table": 2, "table-of-classes": 4}.get(kind)
    for name, rows in [("public", 25), *((str(number), size) for number, size in enumerate(sizes))]:
        x = own.normal(size=(rows, 3)).round(3)
        y = own.integers(0, classes, rows) if classes else (40 + 10 * x[:, 0]).round(2)
        lines = ["a,b,c,y", *(",".join(map(str, [*row, target])) for row, target in zip(x, y, strict=True))]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    facts = {"classes": classes} if classes else {"unit": "mmHg"}
    named = {"file": "nowhere.csv", "test_file": str(folder / "public.csv"), "features": ["a", "b", "c"], "target": "y"}
    return {**named, **facts, "client": "who", "clients": clients, "train_examples": sum(sizes)}


def drawn(rng: random.Random, folder: Path, *, record: bool) -> tuple[Config, str]:
    """A configuration that several machines can run, and of which kind its data are."""
    methods = all_methods()
    while True:
        kind, clients = rng.choice(KINDS), rng.choice([2, 3, 5])
        sections: dict[str, Any] = rng.choice(methods).model_dump(mode="json", exclude_unset=True)
        sections["training"] |= {
            "rounds": rng.choice([1, 2, 4]),
            "clients_per_round": rng.choice([clients, max(1, clients - 1)]),
            "sampling": rng.choice(["fixed", "poisson"]),
            "local_steps": rng.choice([1, 2]),
            **({"local": "dp-sgd", "batch_clip": None} if record else {}),
        }
        sections["privacy"] |= {
            "unit": "record" if record else "client",
            "epsilon": rng.choice([0.7, 4.0, 8.0]),
            "delta": rng.choice([1e-2, 1e-5]),
            "grid_bits": rng.choice([12, 16, 24, 30]),
            **({"adjacency": "replace_one"} if rng.random() < 0.2 else {}),
            **({"evaluation": {"share": 0.2, "examples": 4}} if rng.random() < 0.2 else {}),
        }
        sections["run"] = {"seeded_noise": rng.random() < 0.5, "seed": rng.randrange(1000), "engine": "inline"}
        data = {"client_test_fraction": 0.3} if rng.random() < 0.3 else {}
        if kind == "digits":
            sections["data"] = {"name": "digits", "partition": {"kind": "iid", "clients": clients}, **data}
        else:
            sections["data"] = {"source": tables(folder, rng, kind, clients), **data}
            sections["model"] = {"name": "linear"}
        if kind == "quantities":
            sections["task"] = {"name": "regression"}
        try:
            found = configure(**sections)
        except ConfigError:
            continue
        if deployable(found):
            return found, kind


def consents(config: Config, kind: str, folder: Path) -> dict[int, Consent]:
    """Of each client, to its own file or part."""
    found = {}
    for number in range(calibrated_setting(config)[1].clients):
        agreed = consent_to(config, number)
        if kind != "digits":
            agreed["data"] = {"file": str(folder / f"{number}.csv"), "columns": ["a", "b", "c", "y"]}
        found[number] = Consent.model_validate(agreed)
    return found


def stop() -> None:
    raise KeyboardInterrupt


class Unsteady(Machines):
    """Machines of which one comes late, after so many messages to all of them."""

    def __init__(self, folder: Path, agreed: dict[int, Consent], late: int) -> None:
        super().__init__(folder, agreed, off={0} if late else set())
        self.late = late

    def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> dict[int, bytes | str]:
        self.late -= 1
        if self.late < 0:
            self.off = set()
        return super().answers(messages)

    def come_back(self, seconds: float) -> None:
        """While the server waits for clients."""
        self.off = set()


def test_a_round_that_was_charged_and_does_not_fit_again_is_no_contradiction(tmp_path: Path) -> None:
    """The server was killed after the charge, and asked others when it went on; the run ends, and verify accused it."""
    wanted = base({"name": "dp-fedavg"}, "aggregate", data={"partition": {"kind": "iid", "clients": 2}}, training=TWO)
    there = Machines(tmp_path / "clients", {number: consent(number) for number in range(2)}, off={1})
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        kill_at(patch, SERVER["before the checkpoint"], {2}, stop)
        served(wanted, tmp_path / "run", there)
    there.off = set()
    result, _ = served(wanted, tmp_path / "run", there, resume=True)
    assert result.ended
    with Ledger.open(tmp_path / "run/ledger.sqlite") as ledger:
        assert [entry.round for _, _, entry in ledger.entries()] == [0, 1]
    assert [row["round"] for row in result.history] == [0]
    assert verification(tmp_path / "run").outcome == "verified"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(40))
def test_no_honest_deployment_is_contradicted(number: int, tmp_path: Path) -> None:
    """Methods, views, units, own tables, late clients, restarts, servers that are killed and go on, coarse grids."""
    rng = random.Random(f"honest deployments {number}")
    config, kind = drawn(rng, tmp_path, record=number % 4 == 3)
    there = Unsteady(tmp_path / "clients", consents(config, kind, tmp_path), late=rng.choice([0, 0, 2]))
    there.restarts = rng.random() < 0.5
    out, more = tmp_path / "run", dict[str, Any]()
    if config.training.rounds > 1 and rng.random() < 0.4:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            kill_at(patch, SERVER[rng.choice(["after the charge", "before the checkpoint", "after the checkpoint"])], {2}, stop)
            served(config, out, there, sleep=there.come_back)
        more = {"resume": True}
    served(config, out, there, sleep=there.come_back, **more)
    found = verification(out)
    wrong = [finding for finding in found.findings if finding.kind == "contradicted"]
    for client in there.consents:
        if (tmp_path / "clients" / str(client) / "runs").exists():
            wrong += [finding for finding in compared(out, tmp_path / "clients" / str(client)) if finding.kind == "contradicted"]
    assert wrong == [], (config, wrong)
    assert found.outcome == "verified"
