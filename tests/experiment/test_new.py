"""A new project runs and passes its own test as it is written; its names are checked; plugins tell what is wrong with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedveil
from fedveil.cli.app import app
from fedveil.data import load as loading
from fedveil.data.catalogue import CATALOGUE
from fedveil.errors import ConfigError, DataError
from fedveil.experiment.assembly import prepare
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config_files import load_config
from fedveil.experiment.new_project import PROJECTS, new_project
from fedveil.experiment.plugins import load_plugins
from fedveil.experiment.resolve import data_spec
from fedveil.experiment.resume import resumable
from fedveil.experiment.run import run
from fedveil.methods.method_registry import METHODS
from forked_workers import become
from own_names import forgotten_after

PYTHON = (sys.executable, "-m")
COMMANDS = (
    "run config.toml --out runs/first --quiet --set run.engine=inline --set training.rounds=2 --set training.clients_per_round=5",
    "verify runs/first --trust-plugins",
    "report runs/first",
)
SHORT = ("training.rounds=2", "training.clients_per_round=10", "training.local_epochs=1", "run.engine=inline")


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Methods, data sets, the project's modules and the search path as they were."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    with forgotten_after(METHODS, CATALOGUE, loading._OWN):
        yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    free = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"} | {"PYTHONPATH": str(Path(fedveil.__file__).parents[1])}
    return subprocess.run([*PYTHON, *words], cwd=cwd, env=free, capture_output=True, text=True, check=False)


def outcome_of_tests(folders: list[str], home: Path, *, forked: bool) -> tuple[int, str]:
    """Status and output of their tests, with warnings as errors; forked, they need not import torch again."""
    words = ["-q", "-W", "error", "-p", "no:cacheprovider", *folders]
    if not forked:
        done = command("pytest", *words, cwd=home)
        return done.returncode, done.stdout + done.stderr
    said = home / "said.txt"
    child = os.fork()
    if child == 0:
        try:
            os.chdir(home)
            with said.open("w") as file, open(os.devnull) as nothing:
                become(nothing.fileno(), file.fileno(), file.fileno(), ())
                status = int(pytest.main(words))
                sys.stdout.flush()
                os._exit(status)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.read_text()


def plugin(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


CODE = {
    "binary": ("visits", "walkers.csv"),
    "classification": ("readings", "walkers_method.py", "walkers_data.py", "walkers.csv"),
    "multi-label": ("songs", "walkers.csv"),
    "regression": ("houses", "walkers_net.py", "walkers.csv"),
    "segmentation": ("pictures", "walkers_pictures.py", "walkers.npz"),
    "survival": ("pumps", "walkers.csv"),
    "text": ("sentences", "walkers_words.py", "walkers.csv"),
}


def test_there_is_a_project_for_each_of_them() -> None:
    assert tuple(CODE) == PROJECTS
    described = CliRunner().invoke(app, ["new", "--help"], terminal_width=200).output
    assert all(task in described for task in PROJECTS)


@pytest.mark.parametrize(
    ("tasks", "passed"), [(("classification",), 5), pytest.param(PROJECTS, 29, marks=pytest.mark.slow)], ids=["own method", "all"]
)
def test_new_projects_pass_their_own_tests(tasks: tuple[str, ...], passed: int, tmp_path: Path) -> None:
    """All at once, in a folder with a space in its name; a warning is an error."""
    home = tmp_path / "my projects"
    home.mkdir()
    for task in tasks:
        made = CliRunner().invoke(app, ["new", f"my_{task.replace('-', '_')}", "--task", task, "--dir", str(home)])
        assert made.exit_code == 0, made.output
    status, said = outcome_of_tests([f"my_{task.replace('-', '_')}" for task in tasks], home, forked=len(tasks) == 1)
    assert status == 0, said
    assert f"{passed} passed" in said


@pytest.mark.few(2)
@pytest.mark.parametrize("task", PROJECTS)
def test_a_new_project_is_complete_and_its_commands_work(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "my projects"
    home.mkdir()
    project = new_project("walkers", home, task)
    monkeypatch.chdir(project)
    about, *code = CODE[task]
    assert {p.name for p in project.iterdir()} == {
        *("README.md", "config.toml", ".gitignore", "conftest.py", "test_walkers.py"),
        *(f"make_{about}.py", f"test_{about}.py", *code),
    }
    assert not [p for p in project.iterdir() if b"starter" in p.read_bytes()]
    described = (project / "README.md").read_text()
    assert [
        p.name for p in project.iterdir() if p.name not in (".gitignore", "README.md") and f"`{p.name}`" not in described
    ] == []
    done = [CliRunner().invoke(app, words) for words in (["certify", "config.toml", "--json"], *(w.split() for w in COMMANDS))]
    assert [result.exit_code for result in done] == [0] * len(done), [result.output for result in done]
    assert json.loads(done[0].stdout)["method"] == ("walkers" if task == "classification" else "dp-fedavg")
    assert Path("runs/first/report.html").is_file()


def test_the_commands_of_its_page_exist(tmp_path: Path) -> None:
    project = new_project("walkers", tmp_path)
    lines = [line.split("#")[0].split() for line in (project / "README.md").read_text().splitlines() if line.startswith("    ")]
    names = ["certify", "run", "verify", "replay", "report"]
    assert [line[:2] for line in lines] == [*(["fedveil", name] for name in names), ["python", "-m"]]
    for name in names:
        assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


@pytest.mark.parametrize("task", PROJECTS)
def test_its_data_are_the_same_every_time_and_fit_what_it_says_of_them(task: str, tmp_path: Path) -> None:
    one, other = (new_project(name, tmp_path, task) for name in ("walkers", "riders"))
    (data,) = (path.name for path in one.glob("walkers.*"))
    assert (one / data).read_bytes() == (other / data.replace("walkers", "riders")).read_bytes()
    prepared = prepare(data_spec(load_config(one / "config.toml")))
    assert len(prepared.dataset.x_train) == prepared.dataset.info.train_size > 1000


def test_sentences_of_any_length_and_any_words_become_numbers(tmp_path: Path) -> None:
    load_plugins([str(new_project("walkers", tmp_path, "text") / "walkers_words.py")])
    words: Any = sys.modules["walkers_words"]
    assert words.numbers("We met Zorro") == [2, 5, 1, 0, 0, 0, 0, 0, 0]
    assert words.numbers("the " * 99) == [9] * (words.LENGTH + 1)


def test_a_task_without_a_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--task regresion: .*did you mean 'regression'.*choose binary, classification, mul"):
        new_project("walkers", tmp_path, "regresion")
    with pytest.raises(ConfigError, match="--task shared: there is no project for it"):
        new_project("walkers", tmp_path, "shared")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "2nd", "my-lab", "my lab", "class", "_hidden", "étude", "../up", "a/b", "a.b"])
def test_what_is_no_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot name a project"):
        new_project(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "kind"), [("fedavg", "method"), ("digits", "data set")])
def test_names_that_fedveil_has_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"is the name of a {kind} of fedveil"):
        new_project(name, tmp_path)


def test_what_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "walkers").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        new_project("walkers", tmp_path)
    assert list((tmp_path / "walkers").iterdir()) == []
    with pytest.raises(ConfigError, match="choose a --dir that exists"):
        new_project("walkers", tmp_path / "absent")


def test_the_run_remembers_its_plugins_wherever_it_is_started_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = new_project("walkers", tmp_path)
    monkeypatch.chdir(tmp_path)
    result = run(load_config("walkers/config.toml", SHORT), tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    saved = resumable(tmp_path / "run")
    assert saved.run.plugins == (str(project / "walkers_method.py"), str(project / "walkers_data.py"))
    assert '"plugin walkers_method": "sha256 ' in (tmp_path / "run" / "versions.json").read_text()
    assert run(saved, tmp_path / "run", resume=True).history == result.history


def test_a_run_is_not_resumed_with_another_version_of_its_method(tmp_path: Path) -> None:
    project = new_project("walkers", tmp_path)
    config = load_config(project / "config.toml", SHORT)
    run(config, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    method = project / "walkers_method.py"
    method.write_text(method.read_text() + "\n# changed\n")
    with pytest.raises(ConfigError, match="belongs to another run or to other data"):
        run(config, tmp_path / "run", resume=True)


def test_reading_a_configuration_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[run]\nplugins = ["boom.py"]\n')
    plugin(tmp_path, "boom.py", "raise RuntimeError('it ran')")
    config = load_config(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match=r"boom.py cannot be imported: RuntimeError: it ran \(.*boom.py, line 1\)"):
        certify_config(config)


def test_plugins_that_cannot_be_used_are_told_why(tmp_path: Path) -> None:
    for name, why in [
        (str(tmp_path / "absent.py"), "there is no file .*absent.py"),
        (plugin(tmp_path, "my-method.py", ""), "'my-method' cannot be a module's name"),
        (plugin(tmp_path, "json.py", ""), "there is another module 'json'"),
        (plugin(tmp_path, "broken_one.py", "def"), "broken_one.py cannot be imported: SyntaxError"),
        ("no_such_module", "no_such_module cannot be imported: ModuleNotFoundError"),
    ]:
        with pytest.raises(ConfigError, match=why):
            load_plugins([name])


def test_a_name_belongs_to_one_method_and_one_data_set(tmp_path: Path) -> None:
    new_project("walkers", tmp_path)
    code = (tmp_path / "walkers" / "walkers_method.py").read_text()
    plugin_path = plugin(tmp_path, "taken_one.py", code.replace('"walkers"', '"fedavg"'))
    with pytest.raises(ConfigError, match="'fedavg' of ShrinkingClip belongs to FedAvg"):
        load_plugins([plugin_path])
    data = (tmp_path / "walkers" / "walkers_data.py").read_text()
    with pytest.raises(ConfigError, match="'digits' of read belongs to a data set of fedveil"):
        load_plugins([plugin(tmp_path, "taken_two.py", data.replace('name="walkers"', 'name="digits"'))])
    partial = plugin(tmp_path, "partial_one.py", code.replace("def release", "def _release"))
    with pytest.raises(ConfigError, match="ShrinkingClip is not a method yet: it lacks release"):
        load_plugins([partial])


def test_a_plugin_may_be_an_installed_module_and_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(tmp_path, "counted_one.py", "import builtins\nbuiltins.counted = getattr(builtins, 'counted', 0) + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    load_plugins(["counted_one"])
    load_plugins(["counted_one", str(tmp_path / "counted_one.py")])
    import builtins

    assert builtins.counted == 1  # type: ignore[attr-defined]
    monkeypatch.delattr(builtins, "counted")


def test_data_that_its_reader_cannot_read(tmp_path: Path) -> None:
    project = new_project("walkers", tmp_path)
    config = load_config(project / "config.toml")
    (project / "walkers.csv").rename(project / "moved.csv")
    with pytest.raises(DataError, match=r"walkers cannot be read by walkers_data.read: FileNotFoundError"):
        run(config, tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (project / "moved.csv").rename(tmp_path / "elsewhere" / "walkers.csv")
    assert len(loading.load("walkers", tmp_path / "elsewhere").x_train) == 2400
    short = (tmp_path / "elsewhere" / "walkers.csv").read_text().splitlines()[:-5]
    (tmp_path / "elsewhere" / "walkers.csv").write_text("\n".join(short))
    with pytest.raises(DataError, match="475 test examples; the official split has 480"):
        loading.load("walkers", tmp_path / "elsewhere")
