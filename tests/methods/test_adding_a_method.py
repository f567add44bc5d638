"""The page docs/adding-a-method.md: its example is registered, passes the tests that the page asks for, and learns."""

from __future__ import annotations

import math
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import method_kit as h
from fedveil.accounting.gaussian import epsilon_of
from fedveil.adversary.replay import replay
from fedveil.configuration.config import parse
from fedveil.methods.method_registry import METHODS
from fedveil.statement.certify import certify_config

PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-method.md").read_text()


def block(language: str) -> str:
    """The page's first code block in that language."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example as a module of its own, with its one line in the registry."""
    module = ModuleType("following_clip")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(block("python"), "docs/adding-a-method.md", "exec"), vars(module))
    monkeypatch.setitem(METHODS, "following-clip", module.FollowingClip)


def test_the_example_is_as_short_as_the_page_says() -> None:
    """About twenty lines, without imports and docstrings."""
    lines = [line for line in block("python").splitlines() if line.strip()]
    code = [line for line in lines if not line.lstrip().startswith(("#", '"""', "from ", "import "))]
    assert 15 < len(code) < 25


def test_the_configuration_on_the_page_is_certified_at_its_epsilon() -> None:
    statement = certify_config(parse(tomllib.loads(block("toml"))))
    proven = next(v.proven for v in statement.views if v.view == statement.scope.view)
    assert 7.99 < proven.epsilon <= 8.0


@pytest.mark.parametrize("view", ["server", "aggregate"])
@pytest.mark.heavy
def test_nothing_private_shows_but_through_the_noise(view: str) -> None:
    assert replay(h.at_epsilon_8({"name": "following-clip"}, f"privacy.view={view}", "privacy.epsilon=20000")).findings == {}


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_its_ledger_adds_up_to_the_configured_epsilon_and_its_clip_adapts(view: str) -> None:
    job = h.job_of(h.at_epsilon_8({"name": "following-clip"}, f"privacy.view={view}"))
    rows = h.trained(job).history
    for client in range(6) if view == "server" else [-1]:
        assert 0.999 * 8.0 < epsilon_of(math.sqrt(h.book(job).mu2(client)), 1e-3) <= 8.0
    assert rows[0]["clip"] == 0.5
    assert len({row["clip"] for row in rows}) == 4
    assert all(0.05 <= row["clip"] <= 5.0 for row in rows)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("seeds", "above"), [((2,), 0.5), pytest.param((1, 2, 3, 4), 0.6, marks=pytest.mark.slow)], ids=["one seed", "four seeds"]
)
def test_it_learns(seeds: tuple[int, ...], above: float) -> None:
    many = ('data.partition={kind="iid", clients=180}', "training.clients_per_round=60", "training.sampling=poisson")
    accuracies = []
    for seed in seeds:
        local = ("training.batch_size=8", "training.local_epochs=2", f"run.seed={seed}")
        job = h.job_of(h.at_epsilon_8({"name": "following-clip"}, *many, *local, rounds=20))
        accuracies.append(h.trained(replace(job, evaluate_every=20), stacked=True).history[-1]["test_accuracy"])
    assert sum(accuracies) / len(seeds) > above  # 0.58 to 0.66
