"""Adapters: the arithmetic of LoRA, what is trained, and files in the format of peft.

peft 0.21.2 is not installed with fedveil: it brings transformers and accelerate, 170 MB beside torch, and takes 9 s to import.
Where it is installed, the last test has it read what was written.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedveil.errors import ConfigError
from fedveil.experiment.model_section import network_of
from fedveil.experiment.own_model import built
from fedveil.models.lora import LoraEmbedding, LoraLinear, insert_adapters, save_adapter
from fedveil.models.parts import LoraOptions
from fedveil.training.params import FlatModel, trained_parameters

OPTIONS = LoraOptions(rank=2, targets=("token", "*.q_proj"), alpha=6.0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(6, 4), nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.q_proj(x) * self.v_proj(x)
        return out


class Language(nn.Module):
    """Tokens [n, t] to logits [n, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.block, self.head = nn.Embedding(9, 6, padding_idx=0), Attention(), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.block(self.token(x)).mean(1))
        return out


def adapted(seed: int = 0, **more: object) -> nn.Module:
    section = {"module": Language, "lora": OPTIONS.model_dump(), **more}
    return built(network_of(section), (5,), 3, seed)


def test_only_adapters_are_trained_and_change_nothing_at_first() -> None:
    module, plain = adapted(3), built(network_of(Language), (5,), 3, 3)
    shapes = {name: tuple(p.shape) for name, p in trained_parameters(module).items()}
    assert shapes == {
        "token.lora_embedding_A": (2, 9),
        "token.lora_embedding_B": (6, 2),
        "block.q_proj.lora_A.weight": (2, 6),
        "block.q_proj.lora_B.weight": (4, 2),
    }
    x = torch.randint(9, (4, 5))
    assert torch.equal(module(x), plain(x))


def test_an_adapter_adds_a_low_rank_matrix() -> None:
    module = adapted()
    for p in trained_parameters(module).values():
        nn.init.normal_(p)
    linear, embedding = module.block.q_proj, module.token
    merged = linear.base_layer.weight + 3.0 * linear.lora_B.weight @ linear.lora_A.weight
    x, tokens = torch.randn(7, 6), torch.randint(1, 9, (7,))
    assert torch.allclose(linear(x), x @ merged.T + linear.base_layer.bias, atol=1e-5)
    assert torch.allclose(linear.weight, merged)
    assert torch.equal(linear.bias, linear.base_layer.bias)
    table = embedding.base_layer.weight + 3.0 * (embedding.lora_embedding_B @ embedding.lora_embedding_A).T
    assert torch.allclose(embedding(tokens), table[tokens], atol=1e-5)
    assert torch.allclose(embedding.weight, table)


def test_adapters_come_from_the_seed_alone() -> None:
    state = torch.get_rng_state()
    one, same, other = (adapted(seed).block.q_proj.lora_A.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one.abs().max() <= 6**-0.5, "kaiming uniform with a = sqrt(5)"
    assert torch.equal(torch.get_rng_state(), state)


def test_patterns_train_more_beside_the_adapters() -> None:
    names = trained_parameters(adapted(trainable=["head.*"])).keys()
    assert {"head.weight", "head.bias", "token.lora_embedding_A", "block.q_proj.lora_B.weight"} < names
    assert len(names) == 6


def test_a_layer_in_two_places_has_one_adapter() -> None:
    shared = nn.Linear(3, 3)
    module = nn.ModuleDict({"a": shared, "b": shared})
    insert_adapters(module, LoraOptions(rank=1, targets=("a",)), 0)
    assert isinstance(module["a"], LoraLinear)
    assert not isinstance(module["b"], LoraLinear)
    module = nn.ModuleDict({"a": shared, "b": shared})
    insert_adapters(module, LoraOptions(rank=1, targets=("*",)), 0)
    assert module["a"] is module["b"]


def test_a_transformer_that_reads_weights_of_its_layers_gets_the_adapted_ones() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    insert_adapters(layer, LoraOptions(rank=2, targets=("linear1", "linear2")), 0)
    nn.init.normal_(layer.linear1.lora_B.weight)
    x = torch.randn(3, 5, 8)
    slow = layer(x)
    with torch.inference_mode():
        assert torch.allclose(layer.eval()(x), slow, atol=1e-5)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (("q_porj",), "model.lora.targets: 'q_porj' matches nothing"),
        (("block",), "model.lora.targets: block is a Attention: adapters are for Linear and Embedding"),
        (("attention.out_proj",), "NonDynamicallyQuantizableLinear"),
        (("bounded",), "Embedding with max_norm"),
    ],
)
def test_targets_that_cannot_have_adapters(targets: tuple[str, ...], words: str) -> None:
    module = Language()
    module.attention = nn.MultiheadAttention(4, 2)
    module.bounded = nn.Embedding(2, 2, max_norm=1.0)
    with pytest.raises(ConfigError, match=words):
        insert_adapters(module, LoraOptions(rank=1, targets=targets), 0)


def test_only_layers_that_can_have_adapters_are_offered() -> None:
    module = nn.ModuleDict({"block": nn.Sequential(nn.ReLU()), "fits": nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match=r"'fit' matches nothing.*; there are fits$"):
        insert_adapters(module, LoraOptions(rank=1, targets=("fit",)), 0)
    with pytest.raises(ConfigError, match="'x' matches nothing; there is nothing that it could match"):
        insert_adapters(nn.Sequential(nn.ReLU()), LoraOptions(rank=1, targets=("x",)), 0)


def trained_adapter() -> FlatModel:
    model = FlatModel(adapted(trainable=["head.*"]))
    model.load(torch.randn(model.layout.dimension, generator=torch.Generator().manual_seed(4)))
    return model


def test_names_and_shapes_are_those_of_peft(tmp_path: Path) -> None:
    folder = save_adapter(trained_adapter(), OPTIONS, tmp_path / "adapter")
    shapes = {name: tuple(value.shape) for name, value in load_file(folder / "adapter_model.safetensors").items()}
    assert shapes == {
        "base_model.model.token.lora_embedding_A": (2, 9),
        "base_model.model.token.lora_embedding_B": (6, 2),
        "base_model.model.block.q_proj.lora_A.weight": (2, 6),
        "base_model.model.block.q_proj.lora_B.weight": (4, 2),
        "base_model.model.head.weight": (3, 4),
        "base_model.model.head.bias": (3,),
    }
    described = json.loads((folder / "adapter_config.json").read_text())
    assert described["peft_type"] == "LORA"
    assert (described["r"], described["lora_alpha"]) == (2, 6.0)
    assert described["target_modules"] == ["token", "block.q_proj"]
    assert described["modules_to_save"] == ["head"]


def test_what_peft_has_no_place_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this model has no adapters"):
        save_adapter(FlatModel(Language()), OPTIONS, tmp_path)
    module = adapted(trainable=["*.q_proj.base_layer.bias"])
    with pytest.raises(ConfigError, match=r"peft has no place for block\.q_proj\.base_layer"):
        save_adapter(FlatModel(module), OPTIONS, tmp_path)


@pytest.mark.slow
def test_peft_reads_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft (170 MB beside torch)")
    model = trained_adapter()
    folder = save_adapter(model, OPTIONS, tmp_path)
    base = built(network_of(Language), (5,), 3, 0)
    theirs = peft.PeftModel.from_pretrained(base, folder).eval()
    x = torch.randint(1, 9, (4, 5))
    with torch.no_grad():
        assert torch.allclose(theirs(x), model.module.eval()(x), atol=1e-5)


def test_an_embedding_with_padding_has_no_gradient_there() -> None:
    module = adapted()
    assert isinstance(module.token, LoraEmbedding)
    nn.init.normal_(module.token.lora_embedding_B)
    module(torch.tensor([[0, 0, 1]])).sum().backward()
    gradient = module.token.lora_embedding_A.grad
    assert gradient[:, 0].abs().max() == 0
    assert gradient[:, 1].abs().max() > 0
