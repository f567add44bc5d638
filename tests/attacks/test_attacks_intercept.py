from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedveil.attacks import IG, Bounds, Knowledge, LocalSpec, Upload
from fedveil.attacks.intercept import intercepted, save
from fedveil.attacks.matching import read
from fedveil.params import Layout
from fedveil.release.plan import Plan
from fedveil.release.plan import Upload as Sent


def test_an_upload_of_the_door_becomes_a_gradient(
    digits: tuple[Tensor, Tensor], relu_cnn: nn.Sequential, make_upload: Callable[..., Upload]
) -> None:
    clean = make_upload(relu_cnn, digits[0][:1], digits[1][:1]).tensors
    layout = Layout.of({k: v.shape for k, v in clean.items()})
    vector = torch.cat([-0.1 * v.flatten() for v in clean.values()])
    support = torch.ones_like(vector, dtype=torch.bool)
    support[:5] = False
    sent = Sent(0, 1, vector, torch.arange(float(len(layout))), Plan(), support)
    local = LocalSpec(1, 0.1)
    upload = intercepted(sent, layout, 1, local, signal_norm=2.0)
    target = read([upload], lambda: relu_cnn, relu_cnn.state_dict(), Knowledge(local=local, mask=upload.sent_mask))[0]
    assert all(torch.allclose(v, clean[k], atol=1e-6) for k, v in target.named().items())
    assert target.weight is not None
    assert target.weight[:6].tolist() == [0, 0, 0, 0, 0, 1]
    sizes = [v.numel() for v in clean.values()]
    assert upload.noise_ratio == pytest.approx(sum(i**2 * n for i, n in enumerate(sizes)) ** 0.5 / 2)


def test_a_result_is_saved_with_scores_floors_and_picture(
    tmp_path: Path, digits: tuple[Tensor, Tensor], relu_cnn: nn.Sequential, make_upload: Callable[..., Upload]
) -> None:
    x, y = digits
    sent = make_upload(relu_cnn, x[:2], y[:2])
    bounds, rng = Bounds((1, 28, 28)), torch.Generator().manual_seed(3)
    result = IG(5).run([sent], lambda: relu_cnn, relu_cnn.state_dict(), Knowledge(labels=y[:2]), bounds, rng)
    save(result, x[:2], x[100:200], tmp_path / "run")
    record = json.loads((tmp_path / "run" / "attack-ig.json").read_text(encoding="utf-8"))
    assert record["result"]["seed"] == 3
    assert record["result"]["knowledge"] == ["labels"]
    assert record["result"]["noise_ratio"] == 0
    assert set(record["floors"]) == {"mean image", "other image", "uniform"}
    assert record["scores"]["images"] == 2
    assert (tmp_path / "run" / "attack-ig.png").stat().st_size > 3000
