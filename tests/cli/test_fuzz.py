"""Damaged configurations, data files, run directories and comparisons: every command ends with a documented status and one
line, and what was there before a command that failed is there after it, to the byte."""

from __future__ import annotations

import random
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from fedveil.data import catalogue
from fedveil.errors import DataError
from fedveil.experiment.config import parse
from fedveil.experiment.run import run
from fuzzed_cases import config_text, contents, damage_file, odd_config, program, small_config, write_data

READING = (
    "report",
    "verify",
    "ledger",
    "certify",
    "plot",
    "publish",
    "resume",
    "report --out",
    "verify --json",
    "certify --json",
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run, an interrupted one, and a comparison."""
    folder = tmp_path_factory.mktemp("runs")
    sections = small_config(random.Random(0)) | {"method": {"name": "dp-fedavg"}}
    sections["training"] |= {"rounds": 2}
    sections["data"] |= {"client_test_fraction": 0.2}
    run(parse(sections), folder / "finished")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        import fedveil.experiment.run as module

        real = module.Checkpoints.begin

        def save(self: object, progress: object) -> None:
            if getattr(progress, "round", 0) == 1:
                raise KeyboardInterrupt
            real(self, progress)  # type: ignore[arg-type]

        patch.setattr(module.Checkpoints, "begin", save)
        run(parse(sections), folder / "interrupted")
    (folder / "c.toml").write_text(tomli_w.dumps(sections))
    assert program(*compared(folder / "c.toml", folder / "comparison")).status == 0
    return {name: folder / name for name in ("finished", "interrupted", "comparison")}


def compared(config: Path, out: Path, methods: str = "dp-fedavg,fedavg", epsilon: str = "8", seeds: str = "2") -> list[object]:
    """The words of a comparison of four short runs."""
    return ["compare", config, "--methods", methods, "--epsilon", epsilon, "--seeds", seeds, "--jobs", 1, "--out", out]


@pytest.fixture(autouse=True)
def small_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No network, an MNIST of 60 pictures, and no more than 8 GiB beyond what the process has."""

    def fetch(info: catalogue.Info) -> Path:
        raise DataError("no network in tests")

    monkeypatch.setattr(catalogue, "fetch", fetch)
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    small = replace(catalogue.CATALOGUE["mnist"], train_size=40, test_size=20)
    monkeypatch.setitem(catalogue.CATALOGUE, "mnist", small)  # type: ignore[arg-type]
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if Path("/proc").is_dir() else 0
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + 8 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def config_case(dice: random.Random, folder: Path, directories: dict[str, Path]) -> tuple[str, str]:
    """One configuration, certified or run; the case in words, and what is wrong."""
    config = odd_config(dice)
    (folder / "c.toml").write_bytes(config_text(dice, config))
    words = dice.choice((("certify",), ("run", "--quiet", "--out", folder / "r"), ("certify", "--json"), ("plan",)))
    done = program(words[0], folder / "c.toml", *words[1:])
    return f"config {words[0]}", done.fault()


def data_case(dice: random.Random, folder: Path, directories: dict[str, Path]) -> tuple[str, str]:
    config = small_config(dice) | write_data(dice, folder)
    config["method"] = {"name": "dp-fedavg"}
    config["privacy"]["view"] = "aggregate"
    config["training"]["clients_per_round"] = 3
    (folder / "c.toml").write_text(tomli_w.dumps(config))
    before = contents(folder)
    done = program("run", folder / "c.toml", "--quiet", "--out", folder / "r")
    after = contents(folder)
    lost = [name for name, digest in before.items() if after.get(name) != digest]
    return f"data {config['data'].get('name', 'csv')}", done.fault() or (f"changed: {lost}" if lost else "")


def directory_case(dice: random.Random, folder: Path, directories: dict[str, Path]) -> tuple[str, str]:
    command = dice.choice(READING)
    kind = "interrupted" if command == "resume" or dice.random() < 0.25 else "finished"
    target = folder / "r"
    shutil.copytree(directories[kind], target)
    files = [file for file in sorted(target.rglob("*")) if file.is_file() and not file.name.endswith("-shm")]
    done_to = []
    for file in dice.sample(files, dice.choice((1, 1, 1, 2))):
        done_to.append(f"{file.relative_to(target)} {damage_file(dice, file)}")
    before = contents(target)
    words: dict[str, tuple[object, ...]] = {
        "resume": ("run", "--quiet", "--resume", target),
        "publish": ("publish", target, folder / "copy"),
        "report --out": ("report", target, directories["finished"], "--out", folder / "page.html"),
        "verify --json": ("verify", target, "--json"),
        "certify --json": ("certify", target, "--json"),
    }
    done = program(*words.get(command, (command, target)))
    after = contents(target)
    lost = [name for name, digest in before.items() if after.get(name) != digest] if done.status == 2 else []
    said = f"directory {command} ({kind}; {', '.join(done_to)})"
    return said, done.fault() or (f"changed: {lost} by {done.err}" if lost else "")


def comparison_case(dice: random.Random, folder: Path, directories: dict[str, Path]) -> tuple[str, str]:
    """An odd comparison, or a finished one with damage that is asked for again."""
    if dice.random() < 0.4:
        config = odd_config(dice)
        (folder / "c.toml").write_bytes(config_text(dice, config))
        odd = {name: dice.choice(values) for name, values in COMPARED.items() if dice.random() < 0.3}
        done = program(*compared(folder / "c.toml", folder / "r", **odd))
        return f"comparison of {odd}", done.fault()
    target = folder / "r"
    shutil.copytree(directories["comparison"], target)
    shutil.copy(directories["comparison"].parent / "c.toml", folder)
    files = [file for file in sorted(target.rglob("*")) if file.is_file() and not file.name.endswith("-shm")]
    damaged = {file: damage_file(dice, file) for file in dice.sample(files, dice.choice((1, 1, 1, 2)))}
    before = contents(target)
    done = program(*compared(folder / "c.toml", target))
    after = contents(target)
    said = f"comparison ({', '.join(f'{file.relative_to(target)} {how}' for file, how in damaged.items())})"
    # A run without its summary goes on; all others are finished, and stay as they are.
    unfinished = {file.parent.relative_to(target).as_posix() for file in damaged if file.name == "summary.json"}
    runs = {name: digest for name, digest in before.items() if name.startswith("cells/")}
    kept = {name: digest for name, digest in runs.items() if not any(name.startswith(f"{run}/") for run in unfinished)}
    lost = [name for name, digest in kept.items() if after.get(name) != digest]
    return said, done.fault() or (f"changed: {lost} by {done.err}" if lost else "")


COMPARED = {
    "methods": (
        "",
        ",",
        "dp-fedavg",
        "nobody",
        "fedavg:clip=1",
        "dp-fedavg:clip=nan",
        "nbafl,soteria",
        "dp-fedavg:" * 9,
        "\x00",
    ),
    "epsilon": ("inf", "0", "-1", "nan", "1e308", "5e-324", "8,8", "x", ""),
    "seeds": ("0", "-1", "1", "9" * 30),
}
CASES = (*(config_case, data_case, directory_case) * 3, comparison_case)


def fuzzed(first: int, cases: int, folder: Path, directories: dict[str, Path]) -> list[str]:
    """What is wrong with each of so many cases, of which one in ten is a comparison and the others in equal parts."""
    wrong = []
    for number in range(first, first + cases):
        place = folder / str(number)
        place.mkdir()
        said, fault = CASES[number % len(CASES)](random.Random(number), place, directories)
        if fault:
            wrong.append(f"case {number}: {said}: {fault}")
        shutil.rmtree(place)
    return wrong


def test_fifteen_damaged_inputs(tmp_path: Path, directories: dict[str, Path]) -> None:
    assert fuzzed(0, 15, tmp_path, directories) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 250))
def test_two_thousand_damaged_inputs(first: int, tmp_path: Path, directories: dict[str, Path]) -> None:
    assert fuzzed(first, 250, tmp_path, directories) == []
