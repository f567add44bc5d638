"""Every task is trained on every engine, at client and record level, in both views; its run is verified, reported and drawn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedveil as fv
from federation_runs import assert_same, finished
from fedveil.errors import ConfigError
from fedveil.executors.select_engine import engine
from fedveil.experiment.assembly import prepare
from fedveil.experiment.certify import certify, certify_config
from fedveil.experiment.config import configure
from fedveil.experiment.public_setting import method_of, setting_of
from fedveil.experiment.recorded_run import read_run
from fedveil.experiment.resolve import data_spec
from fedveil.experiment.run import run
from fedveil.federation.evidence import evidence
from fedveil.federation.progress import Progress
from fedveil.report.figures import plot_run
from fedveil.report.report import write_report
from fedveil.statement.statement_layout import to_dict, to_markdown
from fedveil.statement.statement_text import statement_text
from fedveil.verify import verify_run
from method_kit import model_of
from task_runs import BY_EXAMPLE, PLACES, SYMBOLS, TASKS, Sequence, assembled, made, small

LEVELS = [(name, level) for name in TASKS for level in ("client", "record") if level == "client" or name in BY_EXAMPLE]


def trained(name: str, view: str, level: str, on: str, folder: Path) -> Progress:
    job = assembled(small(name, view, level), name, folder / on)
    return finished(job, engine(on, job.context))


VIEWS = [(name, level, view) for name, level in LEVELS for view in ("aggregate", "server")]
BY_RECORD = ("segmentation", "token-prediction", "hazards")
"""Of several targets an example: at record level these and classification are fast."""
FAST = {
    *(one for one in VIEWS if one[0] == "classification"),
    *((name, "client", "aggregate") for name in TASKS),
    *((name, "record", "server") for name in BY_RECORD),
}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "level", "view"), [one if one in FAST else pytest.param(*one, marks=pytest.mark.slow) for one in VIEWS]
)
def test_engines_agree(name: str, level: str, view: str, tmp_path: Path) -> None:
    """The pool to the bit, stacked clients to rounding; a task knows nothing of views, so one task in both of them is fast."""
    inline, pool, batched = (trained(name, view, level, on, tmp_path) for on in ("inline", "pool", "batched"))
    assert_same(inline, pool)
    assert inline.history[-1]["failures"] == {}
    torch.testing.assert_close(batched.model, inline.model, rtol=1e-4, atol=1e-5)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", TASKS)
def test_every_task_learns(name: str, tmp_path: Path) -> None:
    """Without noise the test loss falls, and the main metric gets better."""
    plain = {"privacy": {"epsilon": None, "noise_multiplier": 0.0}, "training": {"rounds": 15, "clients_per_round": 6}}
    job = assembled(small(name, **plain), name, tmp_path / "run")
    history = finished(job, engine("inline", job.context)).history
    main = job.context.task.main
    assert history[-1]["test_loss"] < history[0]["test_loss"]
    assert main.sign * (history[-1][f"test_{main.name}"] - history[0][f"test_{main.name}"]) > 0
    assert len(history[-1][f"client_{main.name}"]) == 6


@pytest.mark.few(2)
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "level"),
    [
        pytest.param(name, level, marks=[pytest.mark.slow] * (level == "record" and name != "classification"))
        for name, level in LEVELS
    ],
)
def test_a_run_directory_verifies_and_is_shown(name: str, level: str, tmp_path: Path) -> None:
    config = small(name, level=level, run={"seeded_noise": False})
    result = run(config, tmp_path / "run", data=made(name))
    main = config.task.main
    assert result.score == result.history[-1][f"test_{main.name}"]
    wrong = [f.text for f in verify_run(result.path).findings if f.kind in ("contradicted", "unknown")]
    assert wrong == []
    read = read_run(result.path)
    assert read.declared.main.name == f"test_{main.name}"
    assert read.points(f"test_{main.name}")[-1][1] == pytest.approx(result.score)
    if level == "client":
        assert main.words.lower() in write_report([result.path]).read_text().lower()
        assert plot_run(result.path, None, tmp_path / "curves.svg").read_text().startswith("<?xml")


def test_large_outputs_are_evaluated_few_at_a_time_and_to_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    data, task, seen = made("token-prediction"), small("token-prediction").task, []
    model = model_of(Sequence())
    model.module.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    test = torch.from_numpy(data.x_test), torch.from_numpy(data.y_test)
    whole = task.scores(*evidence(task, model, *test))
    assert seen == [2, 40]
    monkeypatch.setattr("fedveil.federation.evidence._NUMBERS", 7 * PLACES * SYMBOLS)
    assert task.scores(*evidence(task, model, *test)) == pytest.approx(whole)
    assert seen[2:] == [2, 7, 7, 7, 7, 7, 5]


def test_cox_is_refused_at_record_level_with_the_reason() -> None:
    config = small("cox", level="record")
    with pytest.raises(ConfigError, match=r"'survival' is not a mean over examples: protect.*likelihood = 'hazards'"):
        setting_of(config, prepare(data_spec(config), made("cox")).population)


def test_cox_is_trained_one_client_at_a_time_where_clients_are_stacked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained("cox", "aggregate", "client", "batched", tmp_path)
    assert "is not a built-in mean over examples" in caplog.text


@pytest.mark.parametrize("name", TASKS)
def test_the_statement_lists_what_the_loss_takes_for_public(name: str) -> None:
    config = small(name)
    setting = setting_of(config, prepare(data_spec(config), made(name)).population)
    method = method_of(config)
    statement = certify(method, method.calibrate(setting))
    lines = [a.what for a in statement.assumptions if "constants of the loss are public" in a.what]
    constants = {key: value for key, value in TASKS[name].items() if not isinstance(value, str)}
    assert bool(lines) == bool(constants)
    for key, value in constants.items():
        assert f"task.{key} = {value}" in lines[0]
        for text in (str(to_dict(statement)["assumptions"]), to_markdown(statement), str(statement_text(statement))):
            assert f"task.{key} = {value}" in re.sub(r"\\(.)", r"\1", text.replace("\n", " "))


def test_certifying_a_built_in_task_imports_no_torch() -> None:
    """In another process: the tests have imported it."""
    program = f"""
import sys
from fedveil.experiment.config import configure
from fedveil.experiment.public_setting import Population, method_of, setting_of
from fedveil.data.catalogue import Info, Targets
from fedveil.experiment.certify import certify

for section, classes, target in {[(TASKS[name], made(name).info.classes, made(name).info.target.shape) for name in TASKS]!r}:
    info = Info("x", "", (6,), classes, 9, 9, 0, "", False, (0.0,), (1.0,), 1.0, Targets(target))
    config = configure(task=section, method={{"name": "dp-fedavg"}}, model="mlp", privacy={{"epsilon": 8.0, "delta": 1e-3}})
    method = method_of(config)
    print(certify(method, method.calibrate(setting_of(config, Population(info, 10, 9)))).proven.epsilon)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(TASKS)


def test_a_long_list_is_cut_and_its_length_told() -> None:
    weights, private = {"name": "classification", "class_weights": [1.5] * 10}, {"epsilon": 8.0, "delta": 1e-3}
    config = configure(task=weights, method={"name": "dp-fedavg"}, privacy=private)
    assert any("1.5, ... (10 numbers)]" in a.what for a in certify_config(config).assumptions)


def test_class_weights_balance_the_classes_under_dp_sgd(tmp_path: Path) -> None:
    """The clip of each example cut them off: weight 9 gave a balanced accuracy of 0.51, as weight 1 does."""
    draw = np.random.default_rng(0)
    y = (draw.random(2000) < 0.1).astype(np.int64)
    x = (draw.normal(size=(2000, 4)) + 1.2 * y[:, None]).astype(np.float32)
    data = fv.from_arrays(x[:1600], y[:1600], client=np.arange(1600) % 4, test=(x[1600:], y[1600:]))
    found = {}
    for weight in (1.0, 9.0):
        config = fv.configure(
            model="linear",
            task={"name": "binary", "positive_weight": weight},
            method="fedavg",
            training={"rounds": 4, "local": "dp-sgd", "example_clip": 0.1, "local_epochs": 2, "optimizer": {"lr": 2.0}},
            privacy={"unit": "record", "noise_multiplier": 0.6, "delta": 1e-4, "view": "server"},
            run={"engine": "inline", "seeded_noise": True},
        )
        result = fv.train(config, tmp_path / str(weight), data=data)
        found[weight] = result.scores["balanced_accuracy"]
        assert fv.verification(result.path).outcome == "verified"
    assert found[1.0] < 0.6
    assert found[9.0] > 0.75
