"""`fedveil publish` copies what may be shown, and what it copied is reported, certified, plotted and opened as a run."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedveil.attacks.audit_run import audit_run
from fedveil.cli.app import app
from fedveil.data.dataset import Dataset
from fedveil.data.own.arrays import from_arrays
from fedveil.errors import ConfigError
from fedveil.experiment.config import parse
from fedveil.experiment.published_copy import publish
from fedveil.experiment.recorded_run import read_run
from fedveil.experiment.run import run
from fedveil.experiment.verification import verification
from fedveil.federation import fit as fit_module
from fedveil.ledger.ledger import Ledger
from fedveil.report.report import page_values
from method_kit import digits

CONFIG = digits(
    {"name": "dp-fedavg"},
    "run.seeded_noise=false",
    rounds=3,
    data={"client_test_fraction": 0.2, "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 12}},
    privacy={"epsilon": 8.0},
    training={"sampling": "poisson"},
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(CONFIG, tmp_path_factory.mktemp("made") / "run").path


@pytest.fixture
def shown(made: Path, tmp_path: Path) -> Path:
    return publish(made, tmp_path / "shown")


def test_only_what_may_be_shown_is_copied(made: Path, shown: Path) -> None:
    assert {str(file.relative_to(shown)) for file in shown.rglob("*")} == {
        *("config.toml", "versions.json", "statement.json", "statement.md", "data.json"),
        *("history.csv", "layers.csv", "summary.json", "model.safetensors", "ledger.sqlite", "ledger.sqlite-head"),
    }
    assert {file.stat().st_mode & 0o077 for file in shown.iterdir()} == {0o044}, "everybody may read it"
    for name in ("config.toml", "statement.json", "data.json", "history.csv", "model.safetensors"):
        assert (shown / name).read_bytes() == (made / name).read_bytes()


def secrets_of(made: Path) -> dict[str, str]:
    """Texts that must not be found in what is shown."""
    history = read_run(made).history
    with Ledger.open(made / "ledger.sqlite") as ledger:
        times = [repr(time) for _, time, _ in ledger.entries()]
    return {
        "training loss": repr(history[0]["train_loss"]),
        "seconds": repr(history[-1]["seconds"]),
        "time": times[0],
        "salt": (made / "private" / "salt").read_bytes().hex(),
        "label counts": json.dumps(json.loads((made / "private" / "partition.json").read_text())["counts"][0]),
    }


def test_no_private_figure_is_in_any_byte_of_it(made: Path, shown: Path) -> None:
    content = b"".join(file.read_bytes() for file in sorted(shown.iterdir()))
    own = b"".join(file.read_bytes() for file in sorted(made.rglob("*")) if file.is_file())
    found = secrets_of(made)
    assert all(text.encode() in own for name, text in found.items() if name not in ("salt", "time"))
    assert [name for name, text in found.items() if text.encode() in content] == []
    database = sqlite3.connect(shown / "ledger.sqlite")
    assert database.execute("SELECT count(participants), count(time) FROM release").fetchone() == (0, 0)
    database.close()
    for table in ("history.csv", "summary.json"):
        text = (shown / table).read_text()
        assert not [word for word in ("participants", "seconds", "train_loss", "failed", "uplink") if word in text], table


def test_the_digests_of_private_files_confirm_no_guess(made: Path, shown: Path) -> None:
    """Whoever guesses a private file to the byte cannot confirm it by a digest that is shown."""
    content = b"".join(file.read_bytes() for file in sorted(shown.iterdir()))
    private = [file for file in (made / "private").iterdir() if file.name != "salt"]
    assert len(private) >= 4
    for file in private:
        assert hashlib.sha256(file.read_bytes()).hexdigest().encode() not in content
    salt = (made / "private" / "salt").read_bytes()
    partition = hashlib.sha256(salt + (made / "private" / "partition.json").read_bytes()).hexdigest()
    assert partition.encode() in content, "but they bind the file for whoever has the salt"


def test_how_long_a_round_took_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record can make its client slow: where the network fails on it, all others of its batch are computed one at a time."""
    known = digits({"name": "dp-fedavg"}, rounds=2, training={"evaluate_every": 2}, privacy={"epsilon": 8.0})
    copies = []
    for slow in (1.0, 16.0):
        clock = count(step=slow)
        monkeypatch.setattr(fit_module, "time", SimpleNamespace(perf_counter=lambda clock=clock: next(clock)))
        made = run(known, tmp_path / f"run-{slow:g}")
        assert [row["seconds"] for row in made.history] == [slow, slow]
        shown = publish(made.path, tmp_path / f"shown-{slow:g}")
        summary = json.loads((shown / "summary.json").read_text())
        assert summary.pop("run")
        copies.append(((shown / "history.csv").read_text(), summary))
    assert copies[0] == copies[1]


@pytest.mark.parametrize("command", [["report"], ["certify"], ["plot"], ["ledger"]], ids=lambda c: c[0])
def test_commands_work_on_the_copy(command: list[str], shown: Path) -> None:
    done = CliRunner().invoke(app, [*command, str(shown)])
    assert done.exit_code == 0, (done.output, done.exception)


def test_its_report_shows_what_is_public(shown: Path) -> None:
    values: dict[str, Any] = page_values([read_run(shown)])
    (group,) = values["groups"]
    assert group["curves"]["test_accuracy"]["points"]
    assert group["spent"]["most"]
    assert group["seconds"] is group["clients"] is group["partition"] is None
    assert values["charts"]["private"] == ""


def test_bounds_of_audits_are_copied_and_estimates_on_the_data_are_not(made: Path, tmp_path: Path) -> None:
    audited = Path(shutil.copytree(made, tmp_path / "audited"))
    audit_run(audited, n=20, canaries=4)
    kinds = {audit["rigorous"] for audit in json.loads((audited / "audits.json").read_text())}
    assert kinds == {True, False}
    copied = json.loads((publish(audited, tmp_path / "shown") / "audits.json").read_text())
    assert {audit["rigorous"] for audit in copied} == {True}


def test_the_command(made: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["publish", str(made), str(tmp_path / "a" / "copy")])
    assert done.exit_code == 0
    assert (tmp_path / "a" / "copy" / "data.json").is_file()
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["copy"]


def test_what_is_refused(made: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        publish(made, tmp_path / "full")
    with pytest.raises(ConfigError, match=r"is not a finished run of this version \(it has no data\.json\)"):
        publish(Path(__file__).parent / "data" / "aggregate-0.1", tmp_path / "old")
    unfinished = Path(shutil.copytree(made, tmp_path / "unfinished"))
    (unfinished / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"it has no summary\.json"):
        publish(unfinished, tmp_path / "none")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["full", "unfinished"]


def test_a_contradicted_run_is_not_shown(made: Path, tmp_path: Path) -> None:
    forged = Path(shutil.copytree(made, tmp_path / "forged"))
    config = (forged / "config.toml").read_text()
    (forged / "config.toml").write_text(config.replace("rounds = ", "rounds = 1"))
    with pytest.raises(ConfigError, match=r"is contradicted, so nothing was copied: .*config\.toml"):
        publish(forged, tmp_path / "copy")
    assert [file.name for file in tmp_path.iterdir()] == ["forged"]


UNCOPIED: dict[str, tuple[str, str]] = {
    "ledger.sqlite-journal": ("\0" * 512, "ledger.sqlite-journal lies beside it"),
    "private/history.csv": ("round,seconds,seconds\n0,1,2\n", "a table has a column twice"),
    "private/participants.csv": ("round,client\n0,1\n", r"participants\.csv \(without a digest\)"),
}


@pytest.mark.parametrize("file", UNCOPIED)
def test_a_run_that_is_contradicted_by_what_is_not_copied_is_not_shown(file: str, made: Path, tmp_path: Path) -> None:
    text, words = UNCOPIED[file]
    forged = Path(shutil.copytree(made, tmp_path / "forged"))
    (forged / file).write_text(text)
    with pytest.raises(ConfigError, match=f"is contradicted, so nothing was copied: .*{words}"):
        publish(forged, tmp_path / "copy")
    (forged / "link").symlink_to(made)  # verification reads nothing of it then
    (forged / "history.csv").write_text((forged / "history.csv").read_text().replace("0", "1"))
    with pytest.raises(ConfigError, match=r"is contradicted, so nothing was copied: .*history"):
        publish(forged, tmp_path / "copy")
    assert [file.name for file in tmp_path.iterdir()] == ["forged"]


def neighbours(value: float) -> Dataset:
    """20 clients with 10 examples each; those of client 0 alone are of that value, and training on 3e38 fails."""
    draws = np.random.default_rng(0)
    x, tests = draws.random((200, 8)).astype(np.float32), draws.random((50, 8)).astype(np.float32)
    y, clients = (x[:, 0] > 0.5).astype(np.int64), np.repeat(np.arange(20), 10)
    x[:10] = value
    return from_arrays(x, y, client=clients, test=(tests, (tests[:, 0] > 0.5).astype(np.int64)), name="toy", classes=2)


def shape_of(made: Path, shown: Path) -> dict[str, Any]:
    """What of a published run does not vary with its noise: names of files and columns, numbers of rows, what the ledger says."""
    publish(made, shown)
    tables = {file.name: read_table(file) for file in shown.glob("*.csv")}
    with Ledger.open(shown / "ledger.sqlite", read_only=True) as ledger:
        opening, (closing, _), rows = ledger.meta, ledger.closing or ({}, ""), len(ledger)
    return {
        "files": sorted(file.name for file in shown.iterdir()),
        "sizes": {
            name: (shown / name).stat().st_size for name in ("ledger.sqlite", "model.safetensors", "data.json", "config.toml")
        },
        "tables": {
            name: (list(rows[0]), len(rows), [[k for k in row if row[k]] for row in rows]) for name, rows in tables.items()
        },
        "summary": list(json.loads((shown / "summary.json").read_text())["final"]),
        "opening": sorted(opening["files"]),
        "closing": {**closing, "files": sorted(closing["files"])},
        "releases": rows,
    }


def test_a_private_file_that_is_changed_missing_or_added_is_named(made: Path, tmp_path: Path) -> None:
    """In the run itself: the closing binds `private/digests.json`, and that binds the others."""

    def found(kind: str, change: Callable[[Path], object]) -> str:
        own = Path(shutil.copytree(made, tmp_path / kind))
        change(own / "private")
        wrong = [f for f in verification(own).findings if f.subject in ("files", "other files") and f.kind != "verified"]
        return "; ".join(f"{f.kind}: {f.text}" for f in wrong if "private/" in f.text or f.kind != "trust")

    def reworded(private: Path) -> None:
        digests = json.loads((private / "digests.json").read_text())
        (private / "digests.json").write_text(json.dumps(digests | {"private/history.csv": "0" * 64}))

    assert found("same", lambda private: None) == ""
    changed = found("changed", lambda private: (private / "history.csv").write_text("round\n"))
    assert changed.startswith("contradicted: ")
    assert "private/history.csv" in changed
    assert found("missing", lambda private: (private / "history.csv").unlink()) == "unknown: private/history.csv is gone"
    added = found("added", lambda private: (private / "failures.csv").write_text("round,client,failure\n"))
    assert added.startswith("contradicted: ")
    assert "private/failures.csv (without a digest)" in added
    assert "private/digests.json" in found("reworded", reworded)
    unlisted = found("unlisted", lambda private: (private / "digests.json").unlink())
    assert "unknown: private/digests.json is gone" in unlisted
    assert "private/history.csv" in unlisted


def read_table(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate", "final"])
def test_whether_a_client_failed_is_in_nothing_that_is_shown(view: str, tmp_path: Path) -> None:
    """Also not in the names that the ledger binds: private/failures.csv is there if and only if a client failed."""
    found = {}
    for value in (0.5, 3e38):
        config = parse(
            {
                "method": {"name": "dp-fedavg"},
                "model": {"name": "linear"},
                "data": {"partition": {"kind": "users"}},
                "training": {"rounds": 2, "clients_per_round": 20, "batch_size": 5},
                "privacy": {"epsilon": 1.0, "delta": 1e-3, "view": view},
                "run": {"engine": "inline"},
            }
        )
        made = run(config, tmp_path / f"{value}", data=neighbours(value)).path
        assert (made / "private" / "failures.csv").exists() == (value > 1)
        found[value] = shape_of(made, tmp_path / f"shown-{value}")
    assert found[0.5] == found[3e38]


def test_whether_anybody_took_part_is_in_nothing_that_is_shown(tmp_path: Path) -> None:
    """Poisson sampling, where that is secret, and a method that measures each client: private/participants.csv tells."""
    found: dict[bool, list[Any]] = {True: [], False: []}
    for seed in range(8):
        config = digits(
            {"name": "fed-dpa"},
            "run.seeded_noise=true",
            f"run.seed={seed}",
            rounds=1,
            data={"partition": {"kind": "iid", "clients": 20}},
            privacy={"noise_multiplier": 1.0},
            training={"sampling": "poisson", "clients_per_round": 1},
        )
        made = run(config, tmp_path / f"{seed}").path
        somebody = int(read_run(made).history[0]["participants"]) > 0
        assert (made / "private" / "participants.csv").exists() == somebody
        found[somebody].append(shape_of(made, tmp_path / f"shown-{seed}"))
    assert all(found.values()), "seeds of both kinds"
    assert len({json.dumps(one) for ones in found.values() for one in ones}) == 1
