"""Code of one's own that fails, gives nothing, or ends the program: one line with the place, and status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedveil.cli.app import main
from fedveil.data import catalogue, load
from fedveil.methods import method_registry

PLUGIN = """
{top}
from typing import Literal
from fedveil.data.catalogue import Info
from fedveil.data.load import register as register_data
from fedveil.methods.base import MethodConfig, Policy, SumServer, gaussian_plan
from fedveil.methods.method_registry import register


class Following(Policy):
    def plan(self, s, released, state):
        {plan}
        return gaussian_plan(s, 1.0)


class Server(SumServer):
    def step(self, s, state, total):
        {step}
        return state, total.vector


@register
class Faulty(MethodConfig):
    name: Literal["faulty"] = "faulty"

    def release(self, s):
        {release}
        return Following()

    def server(self, s):
        return Server()

    def claim(self, s):
        {claim}
        return super().claim(s)


@register_data(Info("faulty", "made up", (1, 8, 8), 10, 0, 0, 0, "nowhere", False, (0.5,), (0.5,)))
def read(folder):
    {data}
"""
CONFIG = """
[data]
name = "{name}"
partition = { kind = "iid", clients = 4 }
[model]
name = "linear"
[method]
name = "faulty"
[training]
rounds = 2
clients_per_round = 4
[privacy]
epsilon = 8.0
delta = 1e-3
view = "{view}"
[run]
engine = "{engine}"
plugins = ["faulty_plugin.py"]
"""
PARTS = ("top", "plan", "step", "release", "claim", "data")
Fails = Callable[..., str]


@pytest.fixture
def fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Fails]:
    """Run the program with `code` in one part of the plugin; what it says."""

    def told(part: str, code: str, engine: str = "inline", view: str = "aggregate") -> str:
        plugin, config = PLUGIN, CONFIG
        for each in PARTS:
            plugin = plugin.replace("{" + each + "}", code if each == part else "pass")
        for key, value in {"name": "faulty" if part == "data" else "digits", "engine": engine, "view": view}.items():
            config = config.replace("{" + key + "}", value)
        (tmp_path / "faulty_plugin.py").write_text(plugin)
        (tmp_path / "c.toml").write_text(config)
        monkeypatch.setattr(sys, "argv", ["fedveil", "run", str(tmp_path / "c.toml"), "--out", str(tmp_path / "r"), "--quiet"])
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as stop:
            main()
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert error.count("\n") == 1
        return error

    yield told
    sys.modules.pop("faulty_plugin", None)
    for table in (method_registry.METHODS, catalogue.CATALOGUE, load._OWN):
        table.pop("faulty", None)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("part", "code", "words"),
    [
        ("release", "raise ValueError('boom')", "in release: ValueError: boom"),
        ("release", "raise SystemExit(0)", "in release: SystemExit: 0"),
        ("claim", "raise OSError('boom')", "in claim: OSError: boom"),
        ("claim", "raise GeneratorExit('boom')", "in claim: GeneratorExit: boom"),
    ],
)
def test_what_it_raises_is_told_with_its_place(part: str, code: str, words: str, fails: Fails, tmp_path: Path) -> None:
    line = 1 + PLUGIN.split("{" + part + "}")[0].count("\n")
    assert fails(part, code).startswith(f"fedveil: the plugin {tmp_path / 'faulty_plugin.py'}, line {line}, {words} (--debug")


@pytest.mark.parametrize(
    ("part", "code", "words"),
    [
        ("plan", "raise KeyError('boom')", "KeyError: 'boom'"),
        ("plan", "raise SystemExit", "SystemExit"),
        ("step", "raise ZeroDivisionError", "ZeroDivisionError"),
    ],
)
def test_what_the_rehearsal_meets_is_told_with_its_place(part: str, code: str, words: str, fails: Fails, tmp_path: Path) -> None:
    line, told = 1 + PLUGIN.split("{" + part + "}")[0].count("\n"), fails(part, code)
    assert told.startswith("fedveil: the rehearsal on examples of the test set, before anything is released, failed")
    assert f"{words} (at {tmp_path / 'faulty_plugin.py'}:{line}" in told


@pytest.mark.parametrize("end", ["SystemExit(0)", "SystemExit", "GeneratorExit", "BaseException('boom')"])
def test_a_plugin_that_ends_while_it_is_imported_is_no_success(end: str, fails: Fails, tmp_path: Path) -> None:
    error = fails("top", f"raise {end}")
    assert error.startswith(f"fedveil: run.plugins: {tmp_path / 'faulty_plugin.py'} cannot be imported: {end.partition('(')[0]}")


def test_the_place_is_known_from_a_worker_too(fails: Fails, tmp_path: Path) -> None:
    """In the server view the plans of the second round are made where the client trains."""
    told = fails("plan", "if released.round == 1: raise SystemExit('later')", "pool", "server")
    assert f"the plugin {tmp_path / 'faulty_plugin.py'}, line 12, in plan: SystemExit: later" in told


@pytest.mark.parametrize(
    ("part", "code", "words"),
    [
        ("release", "return None", "`release` returned NoneType; allowed are Schedule, Policy and Unproven"),
        ("plan", "return None", "`plan` returned NoneType for round 0; it must return a Plan"),
        (
            "step",
            "return state, None",
            "the step of its server is NoneType; return one floating-point number per coordinate of the model, 650",
        ),
        ("step", "return state, total.vector[:3]", "the step of its server is torch.float32 of shape (3,)"),
        ("step", "return state, total.vector.long()", "the step of its server is torch.int64 of shape (650,)"),
        ("data", "return None", "faulty cannot be read by faulty_plugin.read: it returned NoneType; it must return RawData"),
        ("data", "return [1, 2]", "it returned list; it must return RawData"),
    ],
)
def test_what_it_returns_is_checked(part: str, code: str, words: str, fails: Fails) -> None:
    assert words in fails(part, code)
