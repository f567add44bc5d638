"""The sections `model` and `method`, typed by name when a configuration is read; plugins are not imported for that."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fedveil.errors import ConfigError
from fedveil.experiment.config import Config, configure, parse
from fedveil.experiment.config_files import load_config
from fedveil.experiment.public_setting import method_of
from fedveil.experiment.run_directory import write_config
from fedveil.experiment.sections import PluginMethod, given_keys
from fedveil.methods.fedavg import DPFedAvg, FedAvg
from fedveil.models.networks import MlpOptions, ResnetOptions
from fedveil.papers.aldp_fl.method import ALDPFL


def test_the_default_is_typed() -> None:
    assert Config().method == FedAvg()
    assert (Config().model.name, Config().model.options) == ("mlp", MlpOptions())


def test_names_give_types() -> None:
    config = parse({"model": {"name": "resnet18", "norm": "batch"}, "method": {"name": "dp-fedavg", "clip": 0.5}})
    assert config.method == DPFedAvg(clip=0.5)
    assert config.model.options == ResnetOptions(norm="batch")
    assert config.model.keeps_statistics
    assert not Config().model.keeps_statistics


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"method": {"name": "dp-fedavg", "clip": -1}}, ["method.clip = -1 is not possible", "greater than 0"]),
        ({"method": {"name": "dp-fedavg", "clipp": 1}}, ["method.clipp = 1: unknown key", "'clip'"]),
        ({"method": {"clip": 1.0}}, ["method = {'clip': 1.0}", "the key name"]),
        ({"method": "dp-fedavg"}, ["method = 'dp-fedavg'", "the key name"]),
        ({"model": {"name": "lenet"}}, ["model.name = 'lenet'", "'lenet5'"]),
        ({"model": {"name": "mlp", "width": 3}}, ["model.width = 3: unknown key", "hidden, activation"]),
        ({"model": {"name": "linear", "hidden": [3]}}, ["model.hidden = [3]: unknown key", "allowed here: start"]),
        ({"model": {"name": "mlp", "hidden": [0]}}, ["model.hidden.0 = 0 is not possible", "greater than 0"]),
        ({"model": "mlp"}, ["model = 'mlp'", "the key name"]),
    ],
)
def test_reading_refuses_with_the_whole_key(section: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(section)
    for word in words:
        assert word in str(caught.value)
    assert "Value error" not in str(caught.value)


def test_problems_of_several_sections_are_told_together() -> None:
    with pytest.raises(ConfigError, match=r"method\.clip = -1 .*; training\.rounds = 0 "):
        parse({"method": {"name": "dp-fedavg", "clip": -1}, "training": {"rounds": 0}})


def test_what_was_given_is_what_is_written(tmp_path: Path) -> None:
    sections = {"model": {"name": "mlp", "hidden": [16, 8]}, "method": {"name": "aldp-fl", "clip_range": [0.5, 2.0]}}
    config = parse(sections)
    for mode in ("json", "python"):
        dumped = config.model_dump(mode=mode)
        assert (dumped["model"], dumped["method"]) == (sections["model"], sections["method"])
    write_config(tmp_path / "config.toml", config.resolved())
    assert load_config(tmp_path / "config.toml") == config
    assert Config.model_validate(config.model_dump()) == config


def test_objects_from_python_are_kept_with_every_parameter() -> None:
    config = configure(method=DPFedAvg(), model="linear")
    assert config.method == DPFedAvg()
    assert config.model.name == "linear"
    assert config.model_dump()["method"] == {"name": "dp-fedavg", "clip": 1.0, "proximal": 0.0}
    assert given_keys(ALDPFL()) == {"name": "aldp-fl"}


OWN = """
from typing import Literal
from fedveil.methods.fedavg import DPFedAvg
from fedveil.methods.method_registry import register


@register
class Own(DPFedAvg):
    name: Literal["own-of-sections"] = "own-of-sections"
    bound: float = 1.0
"""


def test_a_method_of_a_plugin_is_looked_up_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedveil.methods.method_registry import METHODS

    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "plugin_of_sections.py"
    file.write_text(OWN)
    raw = {"method": {"name": "own-of-sections", "bound": 3}, "run": {"plugins": [str(file)]}}
    config = parse(raw)
    assert "plugin_of_sections" not in sys.modules
    assert isinstance(config.method, PluginMethod)
    assert config.method.name == "own-of-sections"
    assert config.model_dump()["method"] == raw["method"]
    try:
        method: Any = method_of(config)
        assert (method.name, method.bound) == ("own-of-sections", 3.0)
        with pytest.raises(ConfigError, match=r"method\.bond = 3: unknown key .*'bound'"):
            method_of(parse({**raw, "method": {"name": "own-of-sections", "bond": 3}}))
    finally:
        METHODS.pop("own-of-sections", None)
        sys.modules.pop("plugin_of_sections", None)
    with pytest.raises(ConfigError, match=r"method\.name = 'own-of-section': unknown method.*run\.plugins"):
        method_of(parse({"method": {"name": "own-of-section"}}))
