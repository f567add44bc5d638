"""Models of one's own: registered by name, by import path, or handed over; their options, and how they are called."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, Field
from torch import nn

import fedveil as fv
from fedveil.errors import ConfigError
from fedveil.experiment.config import parse
from fedveil.experiment.model_section import network_of
from fedveil.experiment.own_model import built
from fedveil.models.model_registry import OWN_MODELS, register_model
from own_names import forgotten_after

NETS = """
from torch import nn


class Net(nn.Module):
    def __init__(self, hidden: int = 4, depths: tuple[int, ...] = (), *, input_shape, outputs):
        super().__init__()
        self.depths = depths
        self.body = nn.Linear(input_shape[0], hidden)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x):
        return self.head(self.body(x))


def fixed(**options):
    return nn.Linear(options["width"], 2)


class inner:
    net = Net


no_model = 3


def wrong():
    return 3
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "nets_of_a_test", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "nets_of_a_test.py").write_text(NETS)
    return tmp_path / "nets_of_a_test.py"


@pytest.fixture
def registry() -> Iterator[None]:
    with forgotten_after(OWN_MODELS):
        yield


def make(section: Any, seed: int = 0) -> nn.Module:
    return built(network_of(section), (3,), 2, seed)


def shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in module.parameters()]


@pytest.mark.parametrize("name", ["Net", "inner.net"])
def test_a_file_with_a_class(nets: Path, name: str) -> None:
    module = make({"name": f"{nets}:{name}", "hidden": 5, "depths": [1, 2]})
    assert shapes(module) == [(5, 3), (5,), (2, 5), (2,)]
    assert module.depths == (1, 2), "typed by its annotation"


def test_an_importable_module(nets: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.syspath_prepend(nets.parent)
    network = network_of({"name": "nets_of_a_test:fixed", "width": 3})
    assert network.code == ("nets_of_a_test",)
    assert "nets_of_a_test" not in sys.modules, "reading a configuration imports nothing"
    assert shapes(built(network, (3,), 2, 0)) == [(2, 3), (2,)]
    assert "nets_of_a_test is imported, which runs its code" in caplog.text


@pytest.mark.parametrize("name", ["no_such_file.py:net", "no_such_package.nets:net", "torch.no_such_module:net"])
def test_nothing_is_said_to_be_imported_that_is_not_there(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"model\.name: (there is no file .*no_such_file\.py|.* cannot be imported)"):
        make({"name": name})
    assert "is imported" not in caplog.text


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Nett", {}, "has no 'Nett' .did you mean 'Net'"),
        ("no_model", {}, "no_model is no class and no function"),
        ("wrong", {}, "wrong makes a int: it must make a torch.nn.Module"),
        ("Net", {"hiden": 3}, r"model.hiden: .*Net has no option 'hiden' .did you mean 'hidden'.*it takes hidden, depths"),
        ("Net", {"hidden": "many"}, "model.hidden = 'many' is not possible: input should be a valid integer"),
        ("Net", {"outputs": 7}, "has no option 'outputs'"),
    ],
)
def test_what_cannot_be_made(nets: Path, name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make({"name": f"{nets}:{name}", **options})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.name: there is no file .*absent\.py"):
        make({"name": f"{tmp_path / 'absent.py'}:Net"})
    with pytest.raises(ConfigError, match=r"model\.name: absent_of_a_test cannot be imported: ModuleNotFoundError"):
        make({"name": "absent_of_a_test:Net"})


class Options(BaseModel):
    hidden: int = Field(4, ge=1)


@pytest.mark.usefixtures("registry")
def test_a_registered_model() -> None:
    @fv.register_model("my-net")
    def my_net(hidden: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, hidden), nn.Linear(hidden, outputs))

    @register_model("typed", Options)
    class Typed(nn.Linear):
        def __init__(self, hidden: int) -> None:
            super().__init__(hidden, 2)

    assert shapes(make({"name": "my-net", "hidden": 6})) == [(6, 3), (6,), (2, 6), (2,)]
    assert shapes(make({"name": "typed"})) == [(2, 4), (2,)]
    with pytest.raises(ConfigError, match=r"model.hidden = 0 is not possible: input should be greater than or equal to 1"):
        make({"name": "typed", "hidden": 0})
    with pytest.raises(ConfigError, match=r"model.hidden: .*my_net needs hidden"):
        make({"name": "my-net"})
    with pytest.raises(ConfigError, match=r"model.name = 'my-nett': unknown model .did you mean 'my-net'"):
        parse({"model": {"name": "my-nett"}})
    parse({"model": {"name": "my-nett"}, "run": {"plugins": ["brings_it"]}})


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("mlp", lambda: None, "belongs to a model of fedveil"),
        ("", lambda: None, "needs the name of the model"),
        ("a:b", lambda: None, "needs the name of the model"),
        ("fine", lambda trainable, name: None, "name, trainable are keys of the section model"),
    ],
)
def test_what_cannot_be_registered(name: str, function: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        register_model(name)(function)
    assert OWN_MODELS.keys().isdisjoint({"fine", "a:b", ""})


def test_the_decorator_needs_a_name() -> None:
    with pytest.raises(ConfigError, match=r'@register_model\("my-net"\)'):
        register_model(lambda: nn.Linear(2, 2))  # type: ignore[arg-type]


def test_what_makes_a_model_draws_from_the_seed_alone() -> None:
    def net(outputs: int) -> nn.Module:
        return nn.Linear(3, outputs)

    state = torch.get_rng_state()
    one, same, other = (make(net, seed).weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_parameters_of_a_module_are_the_initial_model() -> None:
    own = nn.Linear(3, 2)
    one, two = make(own, 1), make(own, 2)
    assert torch.equal(one.weight, own.weight)
    assert torch.equal(two.weight, own.weight)
    assert one.weight is not own.weight, "a run does not change what was handed over"


def test_what_is_handed_over_has_no_other_name() -> None:
    for section in ({"module": nn.Linear(2, 2), "name": "mlp"}, {"module": 3}):
        with pytest.raises(ConfigError, match=r"model\.module = .*: give an nn\.Module, or what makes one"):
            network_of(section)
    with pytest.raises(ConfigError, match=r"model = 3 is not a section: give one with the key name, or an nn.Module"):
        network_of(3)


@pytest.mark.usefixtures("registry")
def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    handed_over, registered = re.findall(r"```python\n(import .*?)```", page, re.S)[:2]
    names: dict[str, Any] = {}
    exec(handed_over, names)
    assert names["result"].score > 0.2
    exec(registered, {"__name__": "page"})
    assert shapes(make({"name": "my-net", "hidden": 3})) == [(3, 3), (3,), (2, 3), (2,)]
