from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedveil.attacks import CapturedUpload, Clip, Knowledge, KnownTraining
from fedveil.attacks.interception import clip_of, intercepted
from fedveil.attacks.matching import read
from fedveil.mechanism.plan import Plan
from fedveil.mechanism.plan import Upload as Sent
from method_kit import layout as layout_of


def test_an_upload_of_the_door_becomes_a_gradient(
    digits: tuple[Tensor, Tensor], relu_cnn: nn.Sequential, make_upload: Callable[..., CapturedUpload]
) -> None:
    clean = make_upload(relu_cnn, digits[0][:1], digits[1][:1]).tensors
    layout = layout_of({k: tuple(v.shape) for k, v in clean.items()})
    vector = torch.cat([-0.1 * v.flatten() for v in clean.values()])
    support = torch.ones_like(vector, dtype=torch.bool)
    support[:5] = False
    sent = Sent(0, 1, vector, torch.arange(float(len(layout))), Plan(), support)
    local = KnownTraining(1, 0.1)
    upload = intercepted(sent, layout, 1, local, signal_norm=2.0)
    target = read([upload], lambda: relu_cnn, relu_cnn.state_dict(), Knowledge(local=local, mask=upload.sent_mask))[0]
    assert all(torch.allclose(v, clean[k], atol=1e-6) for k, v in target.named().items())
    assert target.weight is not None
    assert target.weight[:6].tolist() == [0, 0, 0, 0, 0, 1]
    sizes = [v.numel() for v in clean.values()]
    assert upload.noise_ratio == pytest.approx(sum(i**2 * n for i, n in enumerate(sizes)) ** 0.5 / 2)


def test_noise_lies_where_something_was_sent_and_bounds_are_named() -> None:
    layout = layout_of({"a": (2, 1), "b": (2,)})
    support = torch.tensor([True, False, True, True])
    plan = Plan(clip=3.0, noise_std=0.5, support=support, layer_clip=torch.tensor([1.0, 2.0]))
    sent = Sent(0, 0, torch.ones(4), torch.tensor([0.5, 0.25]), plan, support)
    upload = intercepted(sent, layout, 1, KnownTraining(1, 0.1), signal_norm=1.0)
    assert upload.noise_std is not None
    assert {k: torch.as_tensor(v).flatten().tolist() for k, v in upload.noise_std.items()} == {"a": [0.5, 0.0], "b": [0.25, 0.25]}
    assert upload.noise_ratio == pytest.approx((0.25 + 2 * 0.0625) ** 0.5)
    assert clip_of(plan, layout) == Clip(3.0, {"a": 1.0, "b": 2.0})
    assert clip_of(Plan(clip=3.0), layout) == Clip(3.0)
