"""The program as a newcomer meets it: groups, examples, next commands, and errors that come at once."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.progress import Progress, TimeRemainingColumn

from fedveil.cli import run_terminal
from fedveil.cli.app import COMMANDS, app, main
from fedveil.cli.command_help import KEYS, PANELS
from fedveil.experiment.config import Config, flat
from fedveil.experiment.presets import names
from fedveil.methods.method_registry import METHODS
from fedveil.statement.glossary import TERMS, glossary_page
from fedveil.studies.reproduce.recipe_list import recipe_names, recipes_of

ROOT = Path(__file__).resolve().parents[2]

CONFIG = """
[data]
name = "digits"
[data.partition]
kind = "iid"
clients = 20
[model]
name = "linear"
[method]
name = "dp-fedavg"
clip = 0.5
[training]
rounds = 3
[privacy]
epsilon = 4.0
delta = 1e-4
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(CONFIG)
    return Path("my.toml")


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    """Run the program in this process, and return what it printed, on one line."""
    monkeypatch.setattr(sys, "argv", ["fedveil", *words])
    monkeypatch.setenv("COLUMNS", "200")
    try:
        main()
        code: Any = 0
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (code or 0) == status, out + err
    return " ".join((out + err).replace("│", " ").split())


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command of the program with its words, those of groups included."""
    root: Any = typer.main.get_command(app)
    context = typer.Context(root)
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", one) for inner, one in command.commands.items())
        else:
            yield name, command


def test_every_command_has_an_example_of_itself_in_its_help() -> None:
    every = dict(commands())
    assert len(every) > 30
    lacking = [name for name, command in every.items() if f"Example: fedveil {name}" not in (command.epilog or "")]
    assert lacking == []


def test_commands_come_in_six_groups() -> None:
    assert list(PANELS) == ["Start", "Train", "Check", "Compare", "Share", "Deploy"]
    root: Any = typer.main.get_command(app)
    context = typer.Context(root)
    listed = root.list_commands(context)
    assert {"run", *COMMANDS} <= set(listed)
    groups = [root.get_command(context, name).rich_help_panel for name in listed]
    assert list(dict.fromkeys(groups)) == list(PANELS)
    rows = [f"| {panel} | {', '.join(f'`{name}`' for name in group)} |" for panel, group in PANELS.items()]
    assert "\n".join(rows) in (ROOT / "docs/commands.md").read_text()


def test_the_keys_of_options_are_those_of_a_configuration() -> None:
    written = [f"{section}.{key}" for section, keys in KEYS.items() for key in keys.split()]
    own = [*flat(Config().resolved()), *(f"method.{name}" for name in METHODS["dp-fedavg"].model_fields)]
    assert sorted(written) == sorted(set(own))


def test_an_unknown_option_that_is_a_key_is_answered_with_its_set(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--set training.rounds=VALUE" in said(monkeypatch, capsys, "run", str(config), "--rounds", "3", status=2)
    both = said(monkeypatch, capsys, "certify", str(config), "--lr", "0.1", status=2)
    assert "--set training.optimizer.lr=VALUE or --set training.server_optimizer.lr=VALUE" in both
    assert "--set" not in said(monkeypatch, capsys, "run", str(config), "--nonsense", "3", status=2)


def test_an_unknown_preset_names_the_near_ones_and_not_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(monkeypatch, capsys, "run", "--preset", "noisy-fedavg/mnst", status=2)
    assert all(name in text for name in names("noisy-fedavg"))
    assert "ladp-fl" not in text
    near = said(monkeypatch, capsys, "run", "--preset", "noisyfedavg/mnist-lenet5", status=2)
    assert "noisy-fedavg/mnist-lenet5" in near
    assert near.count("/") < 10


def test_epsilon_is_a_shorthand_of_run_certify_and_plan(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(monkeypatch, capsys, "certify", str(config), "--epsilon", "2.5")
    assert "promise: epsilon 2.5, delta 1e-4 for each client, against anyone who sees the sum of each round" in text
    assert "Next: fedveil plan my.toml" in text
    assert "fedveil run my.toml" in text
    assert said(monkeypatch, capsys, "plan", str(config), "--epsilon", "2.5")
    ran = said(monkeypatch, capsys, "run", str(config), "--epsilon", "2.5", "--out", "made")
    assert "promise: epsilon 2.5" in ran
    assert "Next: fedveil verify made" in ran
    assert "Fingerprint of this run" in ran
    table = said(monkeypatch, capsys, "ledger", "made")
    assert "3 rounds, 3 releases" in table
    assert "epsilon so far" in table
    assert "sum of 20 updates, 650 numbers" in table
    assert table.rstrip().count(" 2.5") == 1, "the last round has spent what was promised"


def test_attack_without_a_kind_lists_the_kinds(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(monkeypatch, capsys, "attack", str(config))
    assert "gradinversion" in text
    assert "fedveil attack my.toml --kind" in text


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("verify runs/nope", "runs/nope is not a run directory, a zip of one, or a ledger file: No such file or directory"),
        ("plot runs/nope", "runs/nope does not exist, so it is not a run directory"),
        ("audit runs/nope", "runs/nope is neither a configuration file nor a run directory"),
        ("attack runs/nope --kind ig", "runs/nope is neither a configuration file nor a run directory"),
        ("ledger runs/nope", "runs/nope is not a run directory or a ledger"),
        ("run nope.toml", "cannot read the configuration nope.toml"),
        ("compare nope.toml --methods fedavg", "cannot read the configuration nope.toml"),
        ("twin my.toml --out full", "full exists and is not empty"),
        ("run my.toml --out full", "full exists and is not empty"),
        ("run --preset nope/nope", "--preset nope/nope: unknown preset"),
        ("run my.toml --rounds 3", "--set training.rounds=VALUE"),
        ("report runs/nope", "runs/nope does not exist, so it is not a run directory"),
        ("predict full table.csv", "full is not a run directory"),
        ("run --resume runs/nope", "runs/nope holds no run"),
        ("budget show nope", "there is no budget at nope"),
        ("attack my.toml --kind nope", "--kind nope: unknown attack"),
        ("attack my.toml --kind dlg --knows nope", "--knows nope: unknown knowledge"),
        ("attack my.toml --kind dlg --out my.toml", "cannot write my.toml: it is a file"),
        ("compare my.toml --methods nope", "--methods nope: unknown method"),
        ("compare my.toml --methods fedavg --out full", "full is not empty and holds no grid"),
        ("tune my.toml --try method.clip=[1]", "say where to tune"),
        ("tune my.toml --on digits --try method.clip=[1] --out my.toml", "cannot write my.toml: it is a file"),
        ("explore --out my.toml/page.html", "my.toml is a file"),
        ("methods nope", "method.name = 'nope': unknown method"),
        ("reproduce ladp-fl --scale nope", "'nope' is not one of 'small', 'paper'"),
        ("certify my.toml --as dpia --json", "--as dpia has a format of its own"),
    ],
)
def test_errors_about_paths_and_options_come_before_anything_large_is_imported(config: Path, words: str, message: str) -> None:
    (config.parent / "full").mkdir()
    (config.parent / "full" / "file").write_text("mine")
    program = (
        "import sys\nfrom fedveil.cli.app import main\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'numpy', 'scipy', 'pydantic') if name in sys.modules])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program, *words.split()], capture_output=True, text=True, env=_wide())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stderr
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout.strip() == "[]"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3, "0.3 s on an idle machine"


def _wide() -> dict[str, str]:
    import os

    return {**os.environ, "COLUMNS": "200"}


def test_the_time_left_is_known_where_a_round_takes_minutes() -> None:
    clock = [0.0]
    bar = Progress(TimeRemainingColumn(), get_time=lambda: clock[0], speed_estimate_period=run_terminal._WHOLE_RUN)
    task = bar.add_task("", total=10)
    for done in range(4):
        bar.update(task, completed=done)
        clock[0] += 120
    assert bar.tasks[0].time_remaining == pytest.approx(7 * 120, rel=0.2)


def test_the_glossary_has_one_source(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "glossary.md"
    assert page.read_text(encoding="utf-8") == glossary_page(), "fedveil explain --markdown > docs/glossary.md"
    assert list(TERMS) == sorted(TERMS, key=str.lower)
    assert said(monkeypatch, capsys, "explain", "zero_out").startswith("zero-out: Neighbours differ in one client")
    assert said(monkeypatch, capsys, "explain", "Aggregate").startswith("aggregate view: ")
    assert "near it are zero-out" in said(monkeypatch, capsys, "explain", "zeroout", status=2)
    assert "delta" in said(monkeypatch, capsys, "explain")


def test_recipes_are_listed_by_paper_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(monkeypatch, capsys, "reproduce")
    assert all(name in text for name in recipe_names())
    assert "fedveil reproduce ladp-fl takes the whole paper" in text
    code = "import sys, fedveil.cli.recipe_terminal as t; t.print_recipes(None); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[-1] == "False"


def test_a_paper_stands_for_all_its_recipes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipes_of("ladp-fl") == [name for name in recipe_names() if name.startswith("ladp-fl/")]
    assert recipes_of("ladp-fl/table-2") == ["ladp-fl/table-2"]
    assert "did you mean 'ladp-fl'" in said(monkeypatch, capsys, "reproduce", "ladpfl", status=2)


def test_the_directory_of_data_sets_has_one_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--dir", "--data-dir"):
        assert "digits: 1437 training" in said(monkeypatch, capsys, "data", "get", "digits", option, str(tmp_path))
