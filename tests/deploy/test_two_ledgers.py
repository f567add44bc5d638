"""The server's ledger against a client's: the same releases pass, and whatever is missing or differs is said in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from federation_runs import config
from fedveil.accounting.types import Gaussian
from fedveil.cli.app import app
from fedveil.experiment.two_ledgers import compared
from fedveil.ledger.budgeted_ledger import named_bits
from fedveil.ledger.entry import Entry
from fedveil.ledger.files import head_path
from fedveil.ledger.ledger import Ledger
from fedveil.verify import Finding
from joined_clients import Machines, consent, served

Change = Callable[[list[Entry]], list[Entry]]


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run of three clients and two rounds with secret noise, beside the clients' folders in `clients`."""
    view = getattr(request, "param", "server")
    sections = {
        "data": {"partition": {"kind": "iid", "clients": 3}},
        "training": {"clients_per_round": 3, "local_steps": 1, "rounds": 2},
        "run": {"seeded_noise": False},
    }
    machines = Machines(tmp_path / "clients", {number: consent(number, seeded_noise=False) for number in range(3)})
    served(config({"name": "dp-fedavg"}, view, **sections), tmp_path / "run", machines)
    return tmp_path / "run"


def client_ledger(run: Path, number: int) -> Path:
    (path,) = (run.parent / "clients" / str(number) / "runs").glob("*/ledger.sqlite")
    return path


def lifetime(run: Path, number: int, view: str = "server") -> Path:
    return run.parent / "clients" / str(number) / f"lifetime-{view}.sqlite"


def rewritten(path: Path, change: Change) -> None:
    """The same ledger with other rows, in a chain of its own, as a liar would write it."""
    with Ledger.open(path) as ledger:
        rows, run, meta = [entry for _, _, entry in ledger.entries()], ledger.run, ledger.meta
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    with Ledger.create(path, run, meta) as ledger:
        ledger.charge_many(change(rows))


def found(run: Path, number: int) -> list[tuple[str, str]]:
    return [(finding.kind, finding.text) for finding in compared(run, run.parent / "clients" / str(number))]


def first(change: Callable[[Entry], list[Entry]], rows: list[Entry]) -> list[Entry]:
    return [*change(rows[0]), *rows[1:]]


def test_both_ledgers_have_the_same_releases_with_their_bits(server: Path) -> None:
    for number in range(3):
        assert found(server, number) == [
            ("verified", f"2 releases of client {number}, the same bits at the same charge"),
            ("verified", "2 releases of this run were charged to it"),
        ]
    with Ledger.open(client_ledger(server, 1)) as ledger:
        digests = [named_bits(entry) for _, _, entry in ledger.entries()]
    assert len(set(digests)) == 2
    assert all(len(digest) == 64 for digest in digests)


LIES: dict[str, tuple[Change, str, str]] = {
    "missing": (partial(first, lambda e: []), "contradicted", "the server charged client 1 with 1 release (round 0, sha256"),
    "other charge": (
        partial(first, lambda e: [replace(e, event=Gaussian(e.event.mu / 2))]),  # type: ignore[union-attr]
        "contradicted",
        "client 1, round 0, sha256",
    ),
    "other bits": (
        partial(first, lambda e: [replace(e, note="released sha256 " + "0" * 64)]),
        "contradicted",
        "which the client's ledger does not have",
    ),
    "no bits": (partial(first, lambda e: [replace(e, note="")]), "contradicted", "which the client's ledger does not have"),
    "one more": (
        partial(first, lambda e: [e, replace(e, note="released sha256 " + "0" * 64)]),
        "unknown",
        "client 1 charged 1 release (round 0, sha256 000000000000), which the server's ledger does not have",
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", LIES)
def test_what_differs_is_said_in_one_line(name: str, server: Path) -> None:
    change, kind, said = LIES[name]
    rewritten(client_ledger(server, 1), change)
    outcome, text = found(server, 1)[0]
    assert (outcome, "\n" in text) == (kind, False)
    assert said in text
    if name == "other charge":
        assert "event is Gaussian(mu=" in text
        assert "at the server and Gaussian(mu=" in text
    assert [kind for kind, _ in found(server, 0)] == ["verified", "verified"]


def test_a_release_that_the_lifetime_lacks_is_contradicted_and_one_more_is_not(server: Path) -> None:
    rewritten(lifetime(server, 0), lambda rows: rows[1:])
    assert found(server, 0)[1] == ("contradicted", "1 of 2 releases were not charged to it")
    rewritten(lifetime(server, 2), lambda rows: [*rows, replace(rows[0], note="")])
    assert found(server, 2)[1][1].endswith("were charged to it, and 1 more that never left (charged before a crash)")


@pytest.mark.parametrize("server", ["aggregate"], indirect=True)
def test_sums_cost_no_more_than_was_charged_at_consent(server: Path) -> None:
    (kind, text), *rest = found(server, 0)
    assert (kind, rest) == ("verified", [])
    assert text.startswith("2 sums cost 99.")
    rewritten(lifetime(server, 1, "aggregate"), lambda rows: [replace(rows[0], event=replace(rows[0].event, count=1))])  # type: ignore[arg-type]
    (kind, text), *_ = found(server, 1)
    assert kind == "contradicted"
    assert "and the client charged 49." in text


def test_the_command_says_it_beside_all_else(server: Path, tmp_path: Path) -> None:
    def call(number: int) -> Any:
        return CliRunner().invoke(app, ["verify", str(server), "--against", str(tmp_path / "clients" / str(number)), "--json"])

    good = call(0)
    assert good.exit_code == 0, good.output
    assert [f["subject"] for f in json.loads(good.output)["findings"]][-3:] == [
        "two ledgers",
        "the client's lifetime",
        "receipts",
    ]
    rewritten(client_ledger(server, 1), lambda rows: rows[1:])
    assert call(1).exit_code == 1
    for path in (client_ledger(server, 2), lifetime(server, 2)):
        rewritten(path, lambda rows: [*rows, replace(rows[0], note="")])
    assert call(2).exit_code == 2


def test_a_folder_that_holds_nothing_of_the_run_and_a_damaged_ledger(server: Path, tmp_path: Path) -> None:
    (finding,) = compared(server, tmp_path)
    assert finding.kind == "unknown"
    assert "holds nothing of run" in finding.text
    path = client_ledger(server, 0)
    head_path(path).write_text("no head")
    (finding,) = compared(server, tmp_path / "clients" / "0")
    assert isinstance(finding, Finding)
    assert "not both can be read" in finding.text
