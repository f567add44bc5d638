"""Several runs of one server, one after the other: a failing one stops no other, and a second start goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from fedveil.cli.app import app
from fedveil.deploy.network_folder import make_network
from fedveil.deploy.queue import serve_queue
from fedveil.errors import ConfigError
from fedveil.experiment.config_files import load_config
from fedveil.experiment.result import Result
from fedveil.experiment.run_directory import present
from joined_clients import Machines, machines, rows, served, small


def written(folder: Path, name: str, **more: Any) -> None:
    values = small(**more).model_dump(mode="json")
    (folder / name).write_text(tomli_w.dumps(present(values)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "queue").mkdir()
    for name in ("a.toml", "c.toml"):
        written(tmp_path / "queue", name)
    (tmp_path / "queue" / "b.toml").write_text("method = { name = 'no-such' }\n")
    return tmp_path


def begin(folder: Path, there: Machines, lines: list[str], on_round: Any = None) -> dict[str, str]:
    def start(config: Path, out: Path, resume: bool) -> Result:
        return served(load_config(config), out, there, resume=resume, on_round=on_round)[0]

    return serve_queue(folder / "queue", folder / "runs", start, lines.append)


def test_runs_follow_each_other_and_a_failing_one_stops_none(folder: Path) -> None:
    there, lines = machines(folder / "clients", lifetime={"server": {"epsilon": 20.0, "delta": 0.01}}), list[str]()
    failed = begin(folder, there, lines)
    assert list(failed) == ["b.toml"]
    assert "no-such" in failed["b.toml"]
    assert [(folder / "runs" / name / "summary.json").exists() for name in "abc"] == [True, False, True]
    assert lines[0] == f"a.toml: begins in {folder / 'runs/a'}; 2 more are waiting"
    assert len({row.run for row in rows(folder / "clients/0/lifetime-server.sqlite")}) == 2
    (folder / "queue" / "b.toml").unlink()
    lines.clear()
    assert begin(folder, there, lines) == {}
    assert lines == [f"{name}.toml: {folder / 'runs' / name} has ended before" for name in "ac"]


def test_a_server_that_was_ended_goes_on_where_it_was_and_takes_what_was_added(folder: Path) -> None:
    there, lines = machines(folder / "clients", lifetime={"server": {"epsilon": 20.0, "delta": 0.01}}), list[str]()

    def stop(row: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin(folder, there, lines, stop)

    def add(row: Any) -> None:
        if not (folder / "queue/d.toml").exists():
            written(folder / "queue", "d.toml", training={"rounds": 1})

    lines.clear()
    assert list(begin(folder, there, lines, add)) == ["b.toml"]
    assert lines[0].startswith("a.toml: goes on in")
    assert [(folder / "runs" / name / "summary.json").exists() for name in "abcd"] == [True, False, True, True]


def test_a_folder_without_configurations_and_a_finished_run_end_at_once(tmp_path: Path) -> None:
    make_network(tmp_path / "network", "127.0.0.1", 9700)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    words = ["serve", "--dir", str(tmp_path / "network")]
    done = CliRunner().invoke(app, [*words, "--resume", str(tmp_path / "run")])
    assert (done.exit_code, done.output) == (0, f"run: {tmp_path / 'run'} has ended before\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"put files NAME\.toml into it"):
        raise CliRunner().invoke(app, [*words, str(tmp_path / "empty")]).exception  # type: ignore[misc]
    assert CliRunner().invoke(app, [*words, str(tmp_path / "empty"), "--resume", str(tmp_path / "run")]).exit_code == 2
