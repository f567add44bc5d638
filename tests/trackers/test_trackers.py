"""TensorBoard and MLflow hold what the run did, read back with their own libraries; the history opens in pandas and DuckDB."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedveil import report
from fedveil.cli.app import app
from fedveil.errors import ConfigError, FedveilError
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config, configure
from fedveil.experiment.config_files import load_config
from fedveil.experiment.result import Result
from fedveil.experiment.run import run
from fedveil.experiment.run_directory import write_history
from fedveil.experiment.tracking import RunInfo, epsilons, numbers
from fedveil.federation.history import Record
from fedveil.statement.statement_layout import to_markdown
from method_kit import layout

LAYERS = ["fc1.weight", "fc1.bias"]


def config(**more: Any) -> Config:
    """Three rounds of ALDP-FL as published, which claims 8 and proves nothing, on six clients of digits."""
    sections: dict[str, Any] = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 6}, "client_test_fraction": 0.2},
        "model": {"name": "linear"},
        "method": {"name": "aldp-fl", "variant": "published"},
        "training": {"rounds": 3, "evaluate_every": 2},
        "privacy": {"epsilon": 8.0, "delta": 0.01, "view": "server"},
        "run": {"engine": "inline", "seeded_noise": True},
    }
    for section, values in more.items():
        sections[section] = {**sections[section], **values}
    return configure(**sections)


class Recorder:
    """A tracker that writes down what it is told, and fails when asked to."""

    name = "Recorder"

    def __init__(self, fails_at: int | str = "never") -> None:
        self.told: list[Any] = []
        self.fails_at = fails_at

    def begin(self, begun: RunInfo) -> None:
        self.tell("begin")

    def round(self, record: dict[str, Any]) -> None:
        self.tell(record["round"])

    def end(self, status: str) -> None:
        self.tell(status)

    def tell(self, what: int | str) -> None:
        self.told.append(what)
        if what == self.fails_at:
            raise OSError("no room")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with MLflow's database, which takes seconds to make."""
    pytest.importorskip("mlflow", reason="needs the extra fedveil[mlflow]")
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture
def store(database: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """MLflow's tracking URI, and an experiment of the test's own; artifacts lie in the working directory, as is MLflow's way."""
    monkeypatch.chdir(database)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", request.node.name)
    return f"sqlite:///{database}/mlflow.db"


def tensorboard_of(folder: Path) -> Any:
    module = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra fedveil[tensorboard]"
    )
    events = module.EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return events


def mlflow_of(uri: str, experiment: str | None = None) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    experiment = experiment or os.environ["MLFLOW_EXPERIMENT_NAME"]
    client = MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, found


def column(result: Result, name: str) -> list[tuple[int, float]]:
    return [(row["round"], pytest.approx(row[name])) for row in result.history if name in row]


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def test_tensorboard_holds_every_round_the_layers_and_the_epsilons(tmp_path: Path) -> None:
    result = run(config(run={"track": ["tensorboard"]}), tmp_path / "run")
    events = tensorboard_of(tmp_path / "run" / "tensorboard")

    def logged(tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(tag)]

    for name in ("train_loss", "test_accuracy", "update_norm", "participants"):
        assert logged(f"history/{name}") == column(result, name)
    assert [step for step, _ in logged("history/test_accuracy")] == [1, 2]
    for i, layer in enumerate(LAYERS):
        wanted = [(row["round"], pytest.approx(row["layer_noise_std"][i])) for row in result.history]
        assert logged(f"layer_noise_std/{layer}") == wanted
    assert logged("claimed_epsilon/server") == [(0, 8.0)]
    assert not any(tag.startswith("proven_epsilon") for tag in events.Tags()["scalars"])  # infinite: in the text
    (histogram, _) = events.Histograms("clients/client_accuracy")
    assert (histogram.step, histogram.histogram_value.num) == (1, 6.0)
    statement = events.Tensors("privacy statement/text_summary")[0].tensor_proto.string_val[0].decode()
    assert statement == to_markdown(result.privacy)
    assert b'name = "aldp-fl"' in events.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0]


def test_tensorboards_table_of_runs_has_settings_and_results(tmp_path: Path) -> None:
    plugin = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    result = run(config(), tmp_path / "run", track=[report.tensorboard(tmp_path / "events")])
    events = tensorboard_of(tmp_path / "events")
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = plugin.parse_session_start_info_plugin_data(content).hparams
    assert settings["method.name"].string_value == "aldp-fl"
    assert settings["privacy.epsilon"].number_value == 8.0
    assert settings["statement.proven.server"].string_value.startswith("epsilon = inf at delta = 0.01")
    assert events.Scalars("hparams/last/test_accuracy")[0].value == pytest.approx(result.accuracy)


# --- MLflow -----------------------------------------------------------------------------------------------------------


def test_mlflow_holds_settings_rounds_guarantees_and_files(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    result = run(config(run={"track": ["mlflow"]}), tmp_path / "first")
    client, found = mlflow_of(store, "fedveil")
    assert (found.info.status, found.info.run_name) == ("FINISHED", "first")
    params = found.data.params
    assert (params["method.name"], params["training.rounds"], params["data.partition.clients"]) == ("aldp-fl", "3", "6")
    assert params["statement.claimed.server"].startswith("epsilon = 8 at delta = 0.01")
    assert params["statement.proven.server"].startswith("epsilon = inf at delta = 0.01")
    assert found.data.metrics["claimed_epsilon/server"] == 8.0
    assert not [key for key in found.data.metrics if key.startswith("proven_epsilon")]
    for name in ("train_loss", "test_accuracy"):
        assert [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, name)] == column(result, name)
    noise = [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, "layer_noise_std/fc1.bias")]
    assert noise == [(row["round"], pytest.approx(row["layer_noise_std"][1])) for row in result.history]
    there = {artifact.path for artifact in client.list_artifacts(found.info.run_id)}
    assert there == {
        *("report.html", "statement.json", "statement.md", "config.toml", "versions.json", "summary.json"),
        *("history.csv", "private"),
    }
    private = {artifact.path for artifact in client.list_artifacts(found.info.run_id, "private")}
    assert private == {f"private/{name}" for name in ("history.csv", "layers.csv", "clients.csv", "participants.csv")}
    copy = Path(client.download_artifacts(found.info.run_id, "statement.json"))
    assert json.loads(copy.read_text()) == json.loads((tmp_path / "first" / "statement.json").read_text())


def test_mlflow_has_the_proven_epsilon_as_a_metric(tmp_path: Path, store: str) -> None:
    private = configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 6}},
        model="linear",
        method={"name": "dp-fedavg"},
        training={"rounds": 1},
        privacy={"epsilon": 3.0, "delta": 0.01},
        run={"engine": "inline"},
    )
    done = run(private, tmp_path / "run", track=[report.mlflow(store, "another")])
    _, found = mlflow_of(store, "another")
    assert found.data.metrics["proven_epsilon/aggregate"] == done.privacy.proven.epsilon
    assert 2.97 < found.data.metrics["proven_epsilon/aggregate"] <= 3.0


def test_infinity_never_becomes_a_large_number(tmp_path: Path, store: str) -> None:
    without_clip = configure(
        data={"name": "digits", "partition": {"kind": "iid", "clients": 6}},
        model="linear",
        training={"rounds": 1},
        run={"engine": "inline", "track": ["mlflow"]},
    )
    result = run(without_clip, tmp_path / "run")
    _, found = mlflow_of(store)
    assert math.isinf(result.history[0]["clip"])
    assert "clip" not in found.data.metrics
    assert max(found.data.metrics.values()) < 1e6


def test_a_server_that_is_not_there_ends_the_run_before_training(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(FedveilError, match=r"MLflow cannot follow the run: .*127.0.0.1.*nothing was trained"):
        run(config(), tmp_path / "run", track=[report.mlflow("http://127.0.0.1:9")])
    assert not (tmp_path / "run" / "history.csv").exists()


@pytest.mark.slow
def test_runs_that_begin_together_share_a_new_database(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///together.db")
    (tmp_path / "c.toml").write_text('[model]\nname = "linear"\n[training]\nrounds = 1\n[run]\nengine = "inline"\n')
    ask = [sys.executable, "-m", "fedveil", "run", "c.toml", "--track", "mlflow", "--quiet", "--out"]
    started = [subprocess.Popen([*ask, f"run-{i}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for i in range(3)]
    errors = [p.communicate()[1] for p in started]
    assert [p.returncode for p in started] == [0, 0, 0], errors
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name(os.environ["MLFLOW_EXPERIMENT_NAME"])
    assert sorted(run.info.run_name for run in client.search_runs([experiment.experiment_id])) == ["run-0", "run-1", "run-2"]


def test_mlflow_reports_to_nobody_else_unless_the_user_says_so(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    report.mlflow(store)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    report.mlflow(store)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "false"


# --- resuming, failing ------------------------------------------------------------------------------------------------


class Cut(Exception):
    """The run is cut off."""


def cut_after(rounds: int) -> Any:
    def on_round(record: dict[str, Any]) -> None:
        if record["round"] + 1 == rounds:
            raise Cut

    return on_round


def test_a_resumed_run_goes_on_where_its_trackers_stopped(tmp_path: Path, store: str) -> None:
    configuration, path = (
        config(run={"track": ["tensorboard", "mlflow"]}, training={"rounds": 5, "evaluate_every": 1}),
        tmp_path / "run",
    )
    with pytest.raises(Cut):
        run(configuration, path, cut_after(2))
    assert mlflow_of(store)[1].info.status == "FAILED"
    result = run(configuration, path, resume=True)
    client, found = mlflow_of(store)  # one run, not two
    assert found.info.status == "FINISHED"
    assert [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, "train_loss")] == column(result, "train_loss")
    scalars = tensorboard_of(path / "tensorboard").Scalars("history/train_loss")
    assert [(event.step, event.value) for event in scalars] == column(result, "train_loss")


def test_a_tracker_added_when_resuming_is_told_the_rounds_before(tmp_path: Path) -> None:
    with pytest.raises(Cut):
        run(config(), tmp_path / "run", cut_after(2))
    result = run(config(run={"track": ["tensorboard"]}), tmp_path / "run", resume=True)
    scalars = tensorboard_of(tmp_path / "run" / "tensorboard").Scalars("history/train_loss")
    assert [(event.step, event.value) for event in scalars] == column(result, "train_loss")


def test_trackers_are_told_all_and_change_nothing(tmp_path: Path) -> None:
    recorder = Recorder()
    followed = run(config(), tmp_path / "told", track=[recorder])
    assert recorder.told == ["begin", 0, 1, 2, "FINISHED"]
    alone = run(config(), tmp_path / "alone")
    drop = {"seconds"}
    assert [{k: v for k, v in row.items() if k not in drop} for row in followed.history] == [
        {k: v for k, v in row.items() if k not in drop} for row in alone.history
    ]


@pytest.mark.parametrize(("fails_at", "heard"), [(1, ["begin", 0, 1]), ("FINISHED", ["begin", 0, 1, 2, "FINISHED"])])
def test_a_tracker_that_fails_is_told_no_more_and_the_run_goes_on(fails_at: int | str, heard: list[Any], tmp_path: Path) -> None:
    failing, other = Recorder(fails_at), Recorder()
    with pytest.warns(RuntimeWarning, match=r"Recorder failed .*OSError: no room.*everything is in .*run") as warned:
        result = run(config(), tmp_path / "run", track=[failing, other])
    assert len(warned) == 1
    assert failing.told == heard
    assert other.told == ["begin", 0, 1, 2, "FINISHED"]
    assert len(result.history) == 3
    assert (tmp_path / "run" / "summary.json").is_file()


def test_a_tracker_that_cannot_begin_ends_the_run_before_training(tmp_path: Path) -> None:
    first, failing = Recorder(), Recorder("begin")
    with pytest.raises(FedveilError, match="Recorder cannot follow the run: OSError: no room; nothing was trained"):
        run(config(), tmp_path / "run", track=[first, failing])
    assert first.told == ["begin", "FAILED"]
    assert not (tmp_path / "run" / "history.csv").exists()
    assert len(run(config(), tmp_path / "run", resume=True).history) == 3


def test_an_interrupted_run_ends_as_killed(tmp_path: Path) -> None:
    recorder = Recorder()

    def interrupt(record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config(), tmp_path / "run", interrupt, track=[recorder])
    assert recorder.told == ["begin", 0, "KILLED"]


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_an_absent_library_is_an_error_that_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"asks for {name}.*pip install 'fedveil\[{name}\]'"):
        run(config(run={"track": [name]}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.track = 'wandb': unknown tracker.*tensorboard, mlflow"):
        run(config(run={"track": ["wandb"]}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_neither_library_is_imported_unless_asked() -> None:
    code = (
        "import sys, fedveil.cli.app, fedveil.experiment.run, fedveil.report.trackers\n"
        "print([m for m in ('mlflow', 'tensorboard', 'torch.utils.tensorboard', 'pandas', 'duckdb') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_command_line_asks_for_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("fedveil.cli.run_commands._train", lambda configuration, *rest: seen.append(configuration.run.track))
    (tmp_path / "c.toml").write_text('[method]\nname = "fedavg"\n')
    asked = CliRunner().invoke(app, ["run", str(tmp_path / "c.toml"), "--track", "mlflow", "--track", "tensorboard"])
    assert asked.exit_code == 0, asked.output
    assert seen == [("mlflow", "tensorboard")]
    assert load_config(tmp_path / "c.toml").run.track == ()


def test_numbers_are_scalars_and_layers() -> None:
    row = {
        "round": 4,
        "clip": 1,
        "loss": 0.5,
        "layer_clip": [1.0, 2.0],
        "client_accuracy": [0.1, 0.2],
        "failures": {},
        "skipped": "x",
    }
    assert numbers(row, ["a", "b"]) == {"clip": 1.0, "loss": 0.5, "layer_clip/a": 1.0, "layer_clip/b": 2.0}
    assert numbers(row, ["a"]) == {"clip": 1.0, "loss": 0.5}


# --- pandas and DuckDB ------------------------------------------------------------------------------------------------


HISTORY = [
    Record(
        {"round": 0, "participants": 2, "clip": math.inf, "layer_clip": [math.inf, 1.5], "skipped": "1 of the 2 clients"},
        {"failed": 1, "failures": {3: 'it said "no",\nand left'}, "loss": math.nan},
    ),
    Record(
        {"round": 1, "participants": 3, "clip": math.inf, "layer_clip": [math.inf, 2.0], "test_accuracy": 0.5},
        {"failed": 0, "failures": {}, "loss": 0.25, "client_accuracy": [0.5, None, 1.0]},
    ),
]


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    write_history(tmp_path, HISTORY, layout({"a": (2,), "b": (1,)}))
    return tmp_path


def test_the_tables_open_in_pandas_with_the_right_types(tables: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(tables / "history.csv")
    kinds = {name: frame[name].dtype.kind for name in ("round", "participants", "clip", "test_accuracy")}
    assert kinds == {"round": "i", "participants": "i", "clip": "f", "test_accuracy": "f"}
    assert pandas.read_csv(tables / "private" / "history.csv")["loss"].dtype.kind == "f"
    assert frame["clip"].tolist() == [math.inf, math.inf]
    assert frame["test_accuracy"].isna().tolist() == [True, False]
    assert pandas.read_csv(tables / "layers.csv")["clip"].tolist() == [math.inf, 1.5, math.inf, 2.0]
    tables /= "private"
    assert pandas.read_csv(tables / "clients.csv")["accuracy"].tolist() == [
        0.5,
        pytest.approx(math.nan, nan_ok=True),
        1.0,
    ]
    assert pandas.read_csv(tables / "failures.csv")["failure"].tolist() == ['it said "no",\nand left']


def test_the_tables_open_in_duckdb_with_the_right_types(tables: Path) -> None:
    duckdb = pytest.importorskip("duckdb")

    def types(name: str) -> dict[str, str]:
        return {row[0]: row[1] for row in duckdb.sql(f"describe from '{tables / name}'").fetchall()}

    wanted = {"round": "BIGINT", "clip": "DOUBLE", "test_accuracy": "DOUBLE", "skipped": "VARCHAR"}
    assert types("history.csv").items() >= wanted.items()
    assert types("private/history.csv").items() >= {"round": "BIGINT", "loss": "DOUBLE"}.items()
    assert types("layers.csv") == {"round": "BIGINT", "layer": "VARCHAR", "clip": "DOUBLE"}
    assert types("private/clients.csv") == {"round": "BIGINT", "client": "BIGINT", "accuracy": "DOUBLE"}
    assert types("private/failures.csv") == {"round": "BIGINT", "client": "BIGINT", "failure": "VARCHAR"}
    rows = duckdb.sql(f"select round, clip, test_accuracy, skipped from '{tables / 'history.csv'}'").fetchall()
    assert rows == [(0, math.inf, None, "1 of the 2 clients"), (1, math.inf, 0.5, None)]
    assert duckdb.sql(f"select failure from '{tables / 'private' / 'failures.csv'}'").fetchall() == [('it said "no",\nand left',)]


def test_the_history_of_a_result_is_a_frame_as_it_is_and_duckdb_asks_it(tmp_path: Path) -> None:
    pandas, duckdb = pytest.importorskip("pandas"), pytest.importorskip("duckdb")
    result = run(config(), tmp_path / "run")
    frame = pandas.DataFrame(result.history)
    assert frame["train_loss"].tolist() == [row["train_loss"] for row in result.history]
    best = duckdb.sql("select max(test_accuracy), count(test_accuracy) from frame").fetchall()
    assert best == [(max(row.get("test_accuracy", 0) for row in result.history), 2)]
    saved = pandas.read_csv(tmp_path / "run" / "history.csv")
    shared = [name for name in saved.columns if name in frame]
    pandas.testing.assert_frame_equal(saved[shared], frame[shared], check_dtype=False)


def test_epsilons_of_a_statement_are_the_finite_ones() -> None:
    assert epsilons(certify_config(config())) == {"claimed_epsilon/server": 8.0}
