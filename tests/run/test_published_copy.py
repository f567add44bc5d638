"""`fedveil publish` copies what may be shown, and what it copied is reported, certified, plotted and opened as a run."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedveil.adversary.audit_run import audit_run
from fedveil.cli.app import app
from fedveil.errors import ConfigError
from fedveil.ledger.ledger import Ledger
from fedveil.pages.report_page import page_values
from fedveil.run.published_copy import publish
from fedveil.run.recorded_run import read_run
from fedveil.run.run import run
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
