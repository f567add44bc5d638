"""Trainable patterns and public weights: only what is named is trained, and the rest has the values that the file has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedveil.errors import ConfigError
from fedveil.experiment.model_section import network_of
from fedveil.experiment.own_model import as_recorded, built, layout_of_network
from fedveil.models.model_registry import build
from fedveil.models.trainable import frozen_digest
from fedveil.training.params import trained_parameters

SHAPE, CLASSES = (1, 8, 8), 10


def module_of(section: Any, seed: int = 0) -> nn.Module:
    return built(network_of(section), SHAPE, CLASSES, seed)


@pytest.mark.parametrize("patterns", [["fc3.*"], ["fc2.weight", "fc3.bias"], ["*.bias"], ["*"]])
def test_a_built_in_network_has_the_same_layout_with_and_without_torch(patterns: list[str]) -> None:
    section = {"name": "mlp", "hidden": [12, 6], "trainable": patterns}
    without = layout_of_network(network_of(section), SHAPE, CLASSES)
    module = module_of(section)
    assert dict(zip(without.names, without.shapes, strict=True)) == {
        n: tuple(p.shape) for n, p in trained_parameters(module).items()
    }
    plain = build("mlp", SHAPE, CLASSES, 0, hidden=(12, 6)).state_dict()
    assert all(torch.equal(value, plain[name]) for name, value in module.state_dict().items())


def test_a_pattern_that_matches_nothing() -> None:
    section = {"name": "mlp", "hidden": [12], "trainable": ["fc2.*", "haed.*"]}
    for look in (module_of, lambda s: layout_of_network(network_of(s), SHAPE, CLASSES)):
        with pytest.raises(
            ConfigError, match=r"model\.trainable: 'haed\.\*' matches nothing.*; there are fc1\.weight, fc1\.bias"
        ):
            look(section)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"trainable": []}, r"model.trainable = \[\] trains nothing: name parameters, .* or leave the key out"),
        ({"trainable": "fc1"}, "model.trainable = 'fc1' is not possible"),
        ({"weights": "x.pt"}, "model.weights = .*x.pt': only safetensors files are read.*safetensors.torch.save_file"),
        ({"lora": {"rank": 0, "targets": ["fc1"]}}, "model.lora.rank = 0 is not possible: .*greater than or equal to 1"),
        ({"lora": {"rank": 1}}, "model.lora.targets: missing"),
        ({"lora": {"rank": 1, "target": ["a"]}}, "model.lora.target = .*unknown key.*targets"),
    ],
)
def test_keys_are_checked_on_reading(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        network_of(section)


def test_a_pattern_may_name_any_name_of_a_tied_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

    assert trained_parameters(module_of({"module": Tied, "trainable": ["b.weight"]})).keys() == {"a.weight"}


def test_patterns_decide_over_what_required_a_gradient() -> None:
    own = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    assert trained_parameters(module_of({"module": own, "trainable": ["0.*"]})).keys() == {"0.weight", "0.bias"}
    assert trained_parameters(module_of(own)).keys() == {"1.weight", "1.bias"}
    assert own[1].weight.requires_grad, "what was handed over stays as it is"
    assert not own[0].weight.requires_grad


def pretrained(tmp_path: Path, **changes: torch.Tensor | None) -> Path:
    """Weights of an mlp, with some entries changed or left out."""
    values = {**build("mlp", SHAPE, CLASSES, 99, hidden=(12,)).state_dict(), **changes}
    save_file({name: v for name, v in values.items() if v is not None}, tmp_path / "public.safetensors")
    return tmp_path / "public.safetensors"


def with_weights(path: Path, **more: Any) -> dict[str, Any]:
    return {"name": "mlp", "hidden": [12], "weights": str(path), **more}


def test_weights_are_those_of_the_file(tmp_path: Path) -> None:
    path = pretrained(tmp_path)
    module = module_of(with_weights(path, trainable=["fc2.*"]))
    wanted = build("mlp", SHAPE, CLASSES, 99, hidden=(12,)).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in module.state_dict().items())
    recorded = as_recorded(network_of(with_weights(path, trainable=["fc2.*"])), SHAPE, CLASSES, 0)
    assert (
        recorded.frozen
        == frozen_digest(module)
        != frozen_digest(module_of({"name": "mlp", "hidden": [12], "trainable": ["fc2.*"]}))
    )
    assert len(recorded.weights) == 64


def test_a_trained_head_may_be_missing_from_the_file(tmp_path: Path) -> None:
    path = pretrained(tmp_path, **{"fc2.weight": None, "fc2.bias": None})
    module = module_of(with_weights(path, trainable=["fc2.*"]), seed=5)
    assert torch.equal(module.fc2.weight, build("mlp", SHAPE, CLASSES, 5, hidden=(12,)).fc2.weight)
    assert torch.equal(module.fc1.weight, build("mlp", SHAPE, CLASSES, 99, hidden=(12,)).fc1.weight)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fc1.bias": None}, "missing: fc1.bias"),
        ({"fc9.bias": torch.zeros(2)}, "unexpected: fc9.bias"),
        ({"fc1.bias": torch.zeros(13)}, r"fc1.bias is float32 \[13\], not float32 \[12\]"),
        ({"fc1.bias": torch.zeros(12, dtype=torch.float64)}, r"fc1.bias is float64 \[12\], not float32 \[12\]"),
    ],
)
def test_a_file_that_does_not_fit(tmp_path: Path, changes: dict[str, torch.Tensor | None], words: str) -> None:
    with pytest.raises(ConfigError, match=f"model.weights = .* does not fit Sequential: {words}"):
        module_of(with_weights(pretrained(tmp_path, **changes), trainable=["fc2.*"]))


def test_half_precision_is_read_exactly(tmp_path: Path) -> None:
    half = build("mlp", SHAPE, CLASSES, 99, hidden=(12,)).half().state_dict()
    module = module_of(with_weights(pretrained(tmp_path, **half)))
    assert torch.equal(module.fc1.weight, half["fc1.weight"].float())


def test_no_pickle_is_read(tmp_path: Path) -> None:
    torch.save({"fc1.weight": torch.zeros(1)}, tmp_path / "x.safetensors")
    for path in (tmp_path / "x.safetensors", tmp_path / "absent.safetensors"):
        with pytest.raises(ConfigError, match="cannot be read as safetensors"):
            module_of(with_weights(path))


def test_another_frozen_part_than_the_recorded_one(tmp_path: Path) -> None:
    section = {"name": "mlp", "hidden": [12], "trainable": ["fc2.*"]}
    recorded = as_recorded(network_of(section), SHAPE, CLASSES, 1)
    again = {**section, "recorded": recorded.model_dump(by_alias=True)}
    module_of(again, seed=1)
    with pytest.raises(ConfigError, match=r"the frozen part of .*Sequential has SHA-256 .* is recorded"):
        module_of(again, seed=2)
    with pytest.raises(ConfigError, match=r"trained parameters of .* are not those recorded \(fc1.bias, fc1.weight, fc2.bias"):
        module_of({**again, "trainable": ["fc1.*"]}, seed=1)
