from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedveil.attacks import ATTACKS, Bounds, CapturedUpload, Knowledge, KnownTraining, attack
from fedveil.attacks.attack_types import Reconstruction
from fedveil.errors import ConfigError


def test_noise_ratio_is_noise_norm_over_signal_norm() -> None:
    tensors = {"a": torch.zeros(3, 4), "b": torch.zeros(4)}
    upload = CapturedUpload(tensors, noise_std={"a": 0.5, "b": torch.tensor([0.0, 0.0, 0.0, 1.0])}, signal_norm=4.0)
    assert upload.noise_ratio == pytest.approx(math.sqrt(12 * 0.25 + 1) / 4)
    assert CapturedUpload(tensors).noise_ratio is None
    assert replace(upload, signal_norm=0.0).noise_ratio == math.inf
    assert replace(upload, signal_norm=0.0, noise_std={}).noise_ratio is None


def test_knowledge_names_what_is_known() -> None:
    knowledge = Knowledge(n=3, noise_std={"a": 0.1})
    assert knowledge.names == ("n", "noise_std")
    assert knowledge.adaptive
    assert not Knowledge(labels=torch.tensor([1])).adaptive


def test_bounds_go_to_images_and_back() -> None:
    bounds = Bounds((2, 1, 1), low=(-1.0, 0.0), high=(1.0, 4.0))
    images = torch.tensor([[[[0.25]], [[0.5]]]])
    assert bounds.inputs(images).flatten().tolist() == pytest.approx([-0.5, 2.0])
    assert bounds.images(bounds.inputs(images)).flatten().tolist() == pytest.approx([0.25, 0.5])
    diverged = torch.tensor([[[[math.nan]], [[math.inf]]], [[[-9.0]], [[1e30]]]])
    assert bounds.images(diverged).flatten().tolist() == [0, 1, 0, 1]
    with pytest.raises(ConfigError, match="low < high"):
        Bounds((1,), 1.0, 1.0).edges()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_uploads_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="NaN or infinity"):
        CapturedUpload({"a": torch.tensor([bad])})


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="n_examples"):
        CapturedUpload({}, n_examples=0)
    for steps, lr, batch in ((0, 0.1, None), (1, 0.0, None), (1, math.inf, None), (1, 0.1, 0)):
        with pytest.raises(ConfigError, match="KnownTraining"):
            KnownTraining(steps, lr, batch)
    with pytest.raises(ConfigError, match="one per step"):
        KnownTraining(2, 0.1, order=((0,),))
    with pytest.raises(ConfigError, match="rates lists 1 entries for 2 steps"):
        KnownTraining(2, 0.1, rates=(0.1,))
    with pytest.raises(ConfigError, match="Adam is simulated without"):
        KnownTraining(1, 0.1, optimizer="adam", momentum=0.9)


def test_attacks_are_made_by_name() -> None:
    assert [kind for kind, one in ATTACKS.items() if one.name != kind] == []
    text = (Path(__file__).parents[2] / "docs" / "attacks.md").read_text()
    rows = [line for line in text.partition("| `--kind` |")[2].partition("\n\n")[0].splitlines() if line.startswith("| `")]
    assert [name for row in rows for name in row.split("|")[1].replace("`", "").replace(" ", "").split(",")] == list(ATTACKS)
    assert attack("ig", steps=7) == ATTACKS["ig"](steps=7)
    with pytest.raises(ConfigError, match="ig, dlg, idlg, gradinversion, subspace, labels"):
        attack("magic")
    with pytest.raises(ConfigError, match="no setting speed; it takes steps"):
        attack("ig", speed=1)


def test_summaries_are_json() -> None:
    one = torch.zeros(1, 1, 2, 2)
    result = Reconstruction(
        attack="ig", x=one, images=one, y=torch.tensor([3]), trial_losses=(0.5, 0.1), chosen=1, steps=20, closures=22,
        seconds=4.0, stop_reason="steps exhausted", knowledge=("n",), adaptive=False, seed=5, noise_ratio=None,
    )  # fmt: skip
    summary = json.loads(json.dumps(result.summary()))
    assert summary["restarts"] == 2
    assert summary["steps_per_second"] == 5
    assert summary["labels"] == [3]
    assert summary["knowledge"] == ["n"]
