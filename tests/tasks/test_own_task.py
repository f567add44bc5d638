"""The page docs/tasks.md: its example runs; tasks of one's own from Python and from plugins, and those of a stranger's run."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from click.testing import Result
from torch import Tensor
from typer.testing import CliRunner

import fedveil as fv
from fedveil.cli.app import app
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config, configure, parse
from fedveil.experiment.config_files import load_config
from fedveil.experiment.plugins import load_plugins
from fedveil.experiment.public_setting import task_of
from fedveil.experiment.recorded_run import read_run
from fedveil.tasks import task_registry
from fedveil.tasks.task import Task
from task_runs import made

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
NAME = "quantile_task"
SPY = 'from pathlib import Path\n\nPath(__file__).with_name("it-ran").touch()\n'


def block(language: str) -> str:
    """The page's first code block in that language."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Tasks and modules of a test are unknown to the next."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield
    forget()


def forget() -> None:
    """As in a new process."""
    sys.modules.pop(NAME, None)
    task_registry.TASKS.pop("quantile", None)


def example() -> type[Task]:
    """The class of the page."""
    module = ModuleType("notebook")
    exec(compile(block("python"), "docs/tasks.md", "exec", dont_inherit=True), vars(module))
    kind: type[Task] = module.Quantile
    return kind


def with_task(task: object, **sections: object) -> Config:
    plain = {"method": fv.DPFedAvg(clip=0.5), "model": {"name": "mlp", "hidden": [8]}, "run": {"engine": "inline"}}
    many = {"rounds": 2, "clients_per_round": 4}
    data = {"partition": {"kind": "iid", "clients": 6}, "client_test_fraction": 0.2}
    return configure(task=task, training=many, data=data, privacy={"epsilon": 8.0, "delta": 0.01}, **plain | sections)


def test_the_example_is_ten_lines_and_a_decorator() -> None:
    lines = [line for line in block("python").split("import fedveil as fv")[1].splitlines() if line.strip()]
    assert lines[0].startswith("@")
    assert len(lines) - 1 <= 10


SEEN: list[float] = []


def test_no_score_is_made_of_what_a_task_kept_of_clients(tmp_path: Path) -> None:
    class Keeping(example()):  # type: ignore[misc]
        name: str = "keeping"

        def losses(self, output: Tensor, target: Tensor) -> Tensor:
            if len(target) > 4:
                SEEN.append(float(target.sum()))
            return super().losses(output, target)  # type: ignore[no-any-return]

        def scores(self, output: Tensor, target: Tensor) -> dict[str, float]:
            return {"below": sum(SEEN[-1:])}

    fv.register_task(Keeping)
    data = made("regression")
    run = fv.train(with_task(Keeping(), run={"engine": "inline"}), tmp_path / "run", data=data)
    public = {0.0, float(torch.from_numpy(data.y_test).sum())}
    assert {row["test_below"] for row in run.history if "test_below" in row} <= public
    assert set(SEEN) <= public


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["object", "class", "name"])
def test_a_task_of_ones_own_is_trained_from_python(form: str, tmp_path: Path) -> None:
    kind = example()
    task = {"object": kind.model_construct(level=0.5), "class": kind, "name": "quantile"}[form]
    if form == "object":
        task = kind.model_validate({"level": 0.5})
    result = fv.train(with_task(task), tmp_path / "run", data=made("regression"))
    assert 0 <= result.score <= 1
    assert result.columns.main.words == "Test share of targets below the prediction"
    assert len(result.history[-1]["client_below"]) == 6
    recorded = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["task"]
    assert recorded == {"name": "quantile"} | ({"level": 0.5} if form == "object" else {})
    stated = (tmp_path / "run" / "statement.md").read_text()
    assert f"task.level = {0.5 if form == 'object' else 0.9}" in stated
    assert "which are code of the user's own" in stated
    again = load_config(tmp_path / "run" / "config.toml")
    assert task_of(again) == task_of(with_task(task))


def test_an_interrupted_run_goes_on_with_the_same_task_and_constants_only(tmp_path: Path) -> None:
    config, data = with_task(example()(level=0.5)), made("regression")  # type: ignore[call-arg]

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fv.train(config, tmp_path / "run", stop, data=data)
    with pytest.raises(ConfigError, match=r"task\.level"):
        fv.train(with_task(example()(level=0.6)), tmp_path / "run", data=data, resume=True)  # type: ignore[call-arg]
    result = fv.train(config, tmp_path / "run", data=data, resume=True)
    assert [row["round"] for row in result.history] == [0, 1]


def test_a_class_that_was_not_registered_is_when_it_is_configured() -> None:
    kind = example()
    del task_registry.TASKS["quantile"]
    assert isinstance(with_task(kind()).task, kind)
    assert task_registry.TASKS["quantile"] is kind
    del task_registry.TASKS["quantile"]
    assert isinstance(with_task(kind).task, kind)
    bare = type("Bare", (Task,), {"__annotations__": {"name": str}, "name": "bare", "__module__": __name__})
    with pytest.raises(ConfigError, match="Bare is not a task yet: it lacks `losses`"):
        with_task(bare)


def test_an_extended_built_in_task_has_columns_of_its_own() -> None:
    from fedveil.federation.history import columns_of
    from fedveil.tasks.classification import Classification

    class Ranked(Classification):
        metrics = (*Classification.metrics, fv.Column("top2", "Among the first two", share=True))

    assert "test_top2" in set(columns_of(Ranked()))
    assert "test_top2" not in set(columns_of(Classification()))


def test_a_bad_task_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    kind = example()
    meaned = type("Meaned", (kind,), {"losses": lambda s, o, t: kind.losses(s, o, t).mean(), "__module__": "notebook"})
    with pytest.raises(ConfigError, match=r"`losses` gives \[\] of float32; it has to be a tensor of floats, \[n\], one"):
        fv.train(with_task(meaned()), tmp_path / "run", data=made("regression"))
    assert not (tmp_path / "run").exists()


# --- plugins ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A run whose task is a plugin that this process has not imported; `it-ran` appears in its parent when it is."""
    (tmp_path / f"{NAME}.py").write_text(SPY + block("python"))
    section = tomllib.loads(block("toml"))
    raw = {"engine": "inline", "plugins": [str(tmp_path / section["run"]["plugins"][0])]}
    made_by = fv.train(with_task(section["task"], run=raw), tmp_path / "run", data=made("regression")).path
    assert (tmp_path / "it-ran").exists()
    (tmp_path / "it-ran").unlink()
    forget()
    return made_by


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.heavy
def test_a_strangers_task_is_not_run_by_reading_reporting_verifying_and_certifying(stranger: Path) -> None:
    assert read_run(stranger).declared.main.name == "test_below"
    for command in ("report", "plot", "ledger", "certify"):
        done = call(command, f"{stranger}")
        assert done.exit_code == 0, done.output
    verified = call("verify", f"{stranger}")
    assert verified.exit_code == 2
    assert re.search(r"statement made again: run\.plugins: .*quantile_task.*--trust-plugins", verified.output)
    refused = call("certify", f"{stranger}/config.toml")
    assert isinstance(refused.exception, ConfigError)
    assert "--trust-plugins" in str(refused.exception)
    assert not (stranger.parent / "it-ran").exists()
    trusted = call("verify", f"{stranger}", "--trust-plugins")
    assert trusted.exit_code == 0, trusted.output
    assert (stranger.parent / "it-ran").exists()


@pytest.mark.heavy
def test_a_strangers_task_at_another_digest_never_runs(stranger: Path) -> None:
    plugin = stranger.parent / f"{NAME}.py"
    plugin.write_text(plugin.read_text() + "\n# changed\n")
    for trust in ([], ["--trust-plugins"]):
        assert "not the code whose digest" in call("verify", f"{stranger}", *trust).output
    assert not (stranger.parent / "it-ran").exists()


@pytest.mark.heavy
def test_a_task_that_a_program_handed_over_is_unknown_elsewhere_and_that_is_said(tmp_path: Path) -> None:
    run = fv.train(with_task(example()), tmp_path / "run", data=made("regression")).path
    forget()
    assert call("report", f"{run}").exit_code == 0
    verified = call("verify", f"{run}")
    assert verified.exit_code == 2
    assert "task.name = 'quantile': unknown task" in verified.output
    assert "needs its file in run.plugins" in verified.output


def test_two_plugins_cannot_take_one_name(tmp_path: Path) -> None:
    for name in (NAME, "other_task"):
        (tmp_path / f"{name}.py").write_text(block("python"))
    load_plugins([str(tmp_path / f"{NAME}.py")])
    with pytest.raises(ConfigError, match="the name 'quantile' of Quantile belongs to Quantile of quantile_task"):
        load_plugins([str(tmp_path / "other_task.py")])
    sys.modules.pop("other_task", None)


def test_an_unknown_constant_of_a_plugins_task_is_named(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.py").write_text(block("python"))
    section = {"name": "quantile", "levle": 0.5}
    config = parse({"task": section, "run": {"plugins": [str(tmp_path / f"{NAME}.py")]}})
    with pytest.raises(ConfigError, match=r"task\.levle = 0\.5: unknown key.*did you mean 'level'"):
        task_of(config)


def test_the_quantile_is_learned(tmp_path: Path) -> None:
    """At level 0.9 nine of ten targets lie below; the mean would leave about half of them there."""
    training = {"rounds": 40, "clients_per_round": 6, "optimizer": {"lr": 0.1}}
    data, plain = made("regression"), {"epsilon": None, "noise_multiplier": 0.0}
    sections = {"model": {"name": "mlp", "hidden": [8]}, "data": {"partition": {"kind": "iid", "clients": 6}}}
    config = configure(
        task=example(),
        method=fv.DPFedAvg(clip=10.0),
        training=training,
        privacy=plain | {"delta": 0.01},
        run={"engine": "inline", "isolation": "copy"},
        **sections,
    )
    assert np.isclose(fv.train(config, tmp_path / "run", data=data).score, 0.9, atol=0.1)
