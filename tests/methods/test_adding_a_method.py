"""The page docs/adding-a-method.md: its examples are plugins, pass the tests that the page asks for, and learn."""

from __future__ import annotations

import math
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import method_kit as h
from fedveil.accounting.gaussian import epsilon_of
from fedveil.attacks.replay import replay
from fedveil.executors.inline import Inline
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import parse
from fedveil.experiment.plugins import load_plugins
from fedveil.federation.fit import fit
from fedveil.federation.progress import Progress, start
from fedveil.methods.method_registry import METHODS
from fedveil.methods.run_cost import is_sum_equivalent

PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-method.md").read_text()


def blocks(language: str) -> list[str]:
    """The page's code blocks in that language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


FOLLOWING, DAMPED = blocks("python")


@pytest.fixture(autouse=True, scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Both examples as plugins, which register themselves."""
    folder, path = tmp_path_factory.mktemp("plugins"), [*sys.path]
    for name, code in (("following_clip", FOLLOWING), ("damped_momentum", DAMPED)):
        (folder / f"{name}.py").write_text(code)
        load_plugins([str(folder / f"{name}.py")])
    yield
    sys.path[:] = path
    for name in ("following_clip", "damped_momentum"):
        sys.modules.pop(name)
        METHODS.pop(name.replace("_", "-"))  # type: ignore[attr-defined]


def test_the_examples_are_short() -> None:
    assert len(FOLLOWING.splitlines()) <= 32
    assert len(DAMPED.splitlines()) <= 30


def test_the_configuration_on_the_page_is_certified_at_its_epsilon() -> None:
    (section,) = blocks("toml")
    statement = certify_config(parse({**tomllib.loads(section), "run": {}}))
    proven = next(v.proven for v in statement.views if v.view == statement.scope.view)
    assert 7.99 < proven.epsilon <= 8.0


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_the_momentum_of_the_server_is_saved_and_its_sum_is_credited(view: str) -> None:
    """Two rounds by hand; the server is given the mean alone, so who sees sums is credited with the noise of all uploads."""
    job = h.job_of(h.at_epsilon_8({"name": "damped-momentum"}, f"privacy.view={view}", rounds=2))
    moved, models = [], [start(job).model]

    def after(progress: Progress) -> None:
        moved.append(progress.served["momentum"].clone())
        models.append(progress.model.clone())

    progress = start(job)
    assert fit(job, Inline(job.context), progress, after) == ""
    assert all(torch.allclose(models[t + 1] - models[t], moved[t], atol=1e-6) for t in range(2))
    assert is_sum_equivalent(job.method, job.setting)


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate"])
@pytest.mark.heavy
def test_nothing_private_shows_but_through_the_noise(view: str) -> None:
    assert replay(h.at_epsilon_8({"name": "following-clip"}, f"privacy.view={view}", "privacy.epsilon=20000")).findings == {}


@pytest.mark.few(1)
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
