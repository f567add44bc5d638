"""A batch of one example, where one alone cannot be learned from: no client's update is thrown away for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedveil as fv
from fedveil.data.dataset import Dataset
from fedveil.deploy.grid_engine import GridEngine
from fedveil.errors import ConfigError
from fedveil.executors.inline import Inline
from fedveil.experiment.assembly import federation
from fedveil.experiment.resolve import opened
from fedveil.federation.fit import fit
from fedveil.federation.progress import Progress, start
from fedveil.ledger.ledger import Ledger
from fedveil.tasks.task_registry import TASKS
from flower_nodes import Nodes
from method_kit import spec_of
from own_names import forgotten_after

pytestmark = pytest.mark.heavy
SIZES = (9, 17, 1, 8, 3)
BATCH = 8


def data(sizes: tuple[int, ...] = SIZES) -> Dataset:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(sum(sizes), 4)).astype("float32"), np.arange(sum(sizes)) % 3
    client, test = np.repeat(np.arange(len(sizes)), sizes), (x[:6], y[:6])
    found: Dataset = fv.from_arrays(x, y, client=client, test=test, classes=3)
    return found


class OwnNorm(nn.Module):
    """Divides by the deviation over the batch, which is NaN for one example."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1e-5) if self.training else x


class Functional(nn.Module):
    """Batch normalisation of the current batch, without a module that fedveil knows."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, torch.zeros(8), torch.ones(8), training=self.training)


def net(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, 3))


def config(model: nn.Module, engine: str = "inline", private: bool = True, **training: Any) -> Any:
    more: dict[str, Any] = {"method": {"name": "fedavg"}}
    if private:
        more = {"method": {"name": "dp-fedavg", "clip": 0.5}, "privacy": {"epsilon": 8.0, "delta": 1e-2}}
    training = {"rounds": 2, "batch_size": BATCH, **training}
    return fv.configure(model=model, training=training, run={"engine": engine, "seed": 3, "seeded_noise": True}, **more)


def failures(path: Path) -> list[str]:
    """The clients whose updates were discarded, and why."""
    file = path / "private" / "failures.csv"
    return file.read_text().splitlines()[1:] if file.exists() else []


@pytest.mark.few(1)
@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(8), lambda: nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Tanh())])
def test_no_update_is_thrown_away_and_all_engines_give_the_same_bits(
    norm: Callable[[], nn.Module], private: bool, tmp_path: Path
) -> None:
    models = {}
    for engine in ("inline", "pool", "stacked", "batched"):
        result = fv.train(config(net(norm()), engine, private), tmp_path / engine, data=data())
        assert failures(result.path) == []
        models[engine] = result.model.vector
    assert all(model.equal(models["inline"]) for model in models.values())


def test_a_client_over_flower_does_the_same(tmp_path: Path) -> None:
    found: list[Progress] = []
    for name in ("inline", "flower"):
        settings = config(net(nn.BatchNorm1d(8)))
        experiment, prepared = opened(settings, data())
        (tmp_path / name).mkdir()
        Ledger.create(tmp_path / name / "ledger.sqlite", "r", {}).close()
        job = federation(experiment, prepared, tmp_path / name / "ledger.sqlite", "r")
        engine = Inline(job.context) if name == "inline" else GridEngine(job.context, "r", Nodes(job.context, tmp_path / "nodes"))
        found.append(start(job))
        fit(job, engine, found[-1])
        assert found[-1].history[-1]["failed"] == 0
    assert found[0].model.equal(found[1].model)


def reference(model: nn.Module, whole: Dataset, batches: list[Tensor], *, trains: bool = True) -> Tensor:
    """Plain steps with torch alone: the parameters [d]."""
    model.train(trains)
    parameters = list(model.parameters())
    for rows in batches:
        x, y = (torch.from_numpy(part)[rows] for part in (whole.x_train, whole.y_train))
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
        with torch.no_grad():
            for p, gradient in zip(parameters, gradients, strict=True):
                p -= 0.1 * gradient
    return torch.cat([p.detach().reshape(-1) for p in parameters])


@pytest.mark.parametrize("steps", [None, 3])
def test_the_rest_of_one_joins_the_batch_before_it(steps: int | None, tmp_path: Path) -> None:
    whole, sgd = data((BATCH + 1,)), {"name": "sgd", "lr": 0.1}
    more = {} if steps is None else {"local_steps": steps}
    settings = config(net(nn.BatchNorm1d(8)), private=False, rounds=1, optimizer=sgd, **more)
    model = fv.train(settings, tmp_path / "run", data=whole).model.vector
    wanted = reference(net(nn.BatchNorm1d(8)), whole, [torch.arange(BATCH + 1)] * (steps or 1))
    assert float((model - wanted).norm()) <= 1e-5 * float(wanted.norm())


def test_a_single_example_is_normalised_by_the_running_statistics_which_stay(tmp_path: Path) -> None:
    whole, sgd = data((1,)), {"name": "sgd", "lr": 0.1}
    result = fv.train(config(net(nn.BatchNorm1d(8)), private=False, rounds=1, optimizer=sgd), tmp_path / "run", data=whole)
    wanted = reference(net(nn.BatchNorm1d(8)), whole, [torch.zeros(1, dtype=torch.long)], trains=False)
    assert float((result.model.vector - wanted).norm()) <= 1e-6 * float(wanted.norm())
    assert result.model.buffers().equal(torch.cat([torch.zeros(8), torch.ones(8)]))


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 7, 8])
def test_batches_of_a_pass(batch: int, pairs: bool) -> None:
    spec = replace(spec_of(local_epochs=3, batch_size=batch), pairs=pairs)
    for examples in range(1, 40):
        sizes = spec.batch_sizes(examples)
        assert sum(sizes) == examples
        assert len(sizes) == spec.batches_for(examples) == spec.steps_for(examples) // 3
        plain = [len(part) for part in torch.split(torch.arange(examples), batch)]
        if not pairs or batch == 1 or examples == 1 or plain[-1] > 1:
            assert sizes == plain, "no other run's batches change"
        else:
            assert sizes == [*plain[:-2], batch + 1]


def pairs(model: nn.Module, shape: tuple[int, ...] = (4,), **more: Any) -> bool:
    """Whether a run of this network joins a rest of one."""
    x, y = np.random.default_rng(0).normal(size=(12, *shape)).astype("float32"), np.arange(12) % 3
    settings = config(model, **more)
    data = fv.from_arrays(x, y, client=np.arange(12) % 3, test=(x[:6], y[:6]))
    return federation(*opened(settings, data), Path("none"), "r").context.spec.pairs


def test_where_one_example_can_be_learned_from_nothing_changes() -> None:
    pictures = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    assert not pairs(pictures, (1, 8, 8)), "an example has several values in each channel"
    assert not pairs(net(nn.LayerNorm(8)))
    assert not pairs(net(nn.GroupNorm(2, 8)))
    frozen = net(nn.BatchNorm1d(8))
    frozen[1].requires_grad_(False)
    assert not pairs(frozen), "it uses the statistics that it has"
    assert pairs(net(nn.BatchNorm1d(8)))
    assert pairs(net(OwnNorm()))
    assert pairs(net(Functional()))


@pytest.mark.few(2)
@pytest.mark.parametrize("norm", [OwnNorm, Functional])
@pytest.mark.parametrize("engine", ["inline", "pool", "stacked", "batched"])
def test_a_normalisation_of_ones_own(
    norm: type[nn.Module], engine: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rest of one joins; a client's only example cannot be learned from, and the operator hears of it before the run."""
    result = fv.train(config(net(norm()), engine), tmp_path / "run", data=data((9, 17, 8, 3)))
    assert failures(result.path) == []
    assert "clients with a single example will be left out" in caplog.text


class Scaled(nn.Module):
    """Its slope is not a number for one example, and its value is."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / ((x - x.mean(0)).square().mean(0).sqrt() + 1e-3) if self.training else x


@pytest.mark.parametrize("engine", ["inline", "pool", "batched"])
def test_a_slope_that_is_no_number_for_one_example_is_refused(engine: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be trained on a batch of one.*contains NaN.*take nn\.GroupNorm"):
        fv.train(config(net(Scaled()), engine), tmp_path / "run", data=data())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ["inline", "pool", "batched", "flower"])
def test_a_batch_size_of_one_is_refused_where_none_can_be_learned_from(engine: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.batch_size = 1, and Sequential cannot learn from one.*to 2 or more"):
        fv.train(config(net(nn.BatchNorm1d(8)), engine, batch_size=1), tmp_path / "run", data=data())
    assert not (tmp_path / "run").exists()
    fv.train(config(net(nn.LayerNorm(8)), "inline", batch_size=1), tmp_path / "run", data=data())


@pytest.fixture
def among_pairs() -> Iterator[str]:
    """A loss over the pairs of a batch, which is not a number without any."""

    class AmongPairs(fv.Task):  # type: ignore[misc]
        name: str = "among-pairs"
        metrics: ClassVar = (fv.Column("error", better="lower"),)

        def outputs(self, info: Any) -> int:
            return 3

        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            others = ~torch.eye(len(target), dtype=torch.bool)
            return (output @ output.T)[others].square().mean()

        def scores(self, output: Tensor, target: Tensor) -> dict[str, float]:
            return {"error": float((output.argmax(1) != target).double().mean())}

        def test_loss(self, output: Tensor, target: Tensor) -> float:
            return float(output.square().mean())

    with forgotten_after(TASKS):
        fv.register_task(AmongPairs)
        yield "among-pairs"


def test_a_loss_over_pairs(among_pairs: str, tmp_path: Path) -> None:
    whole, training = data((9, 17, 8, 3)), {"rounds": 2, "batch_size": BATCH}
    settings = fv.configure(model=net(nn.ReLU()), task=among_pairs, method="fedavg", training=training)
    assert failures(fv.train(settings, tmp_path / "run", data=whole).path) == []
