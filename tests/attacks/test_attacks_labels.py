from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedveil.attacks import Bounds, CapturedUpload, Knowledge
from fedveil.attacks.attack_types import Clip
from fedveil.attacks.labels import class_gradient, counted, infer, label_counts, mean_prediction, single_label, unique_labels
from fedveil.attacks.matching import read
from fedveil.errors import ConfigError

BOUNDS = Bounds((1, 28, 28))


@given(st.lists(st.integers(0, 40), min_size=2, max_size=12).filter(any), st.integers(0, 10_000))
def test_counts_follow_from_the_formula(counts: list[int], seed: int) -> None:
    truth, n = torch.tensor(counts), sum(counts)
    prediction = torch.rand(len(counts), generator=torch.Generator().manual_seed(seed)).softmax(0)
    assert torch.equal(label_counts(prediction - truth / n, prediction, n), truth)


@given(st.lists(st.floats(-3, 3), min_size=10, max_size=10), st.integers(1, 64))
def test_counts_always_sum_to_the_batch(noise: list[float], n: int) -> None:
    counts = label_counts(torch.tensor(noise), torch.full((10,), 0.1), n)
    assert int(counts.sum()) == n
    assert int(counts.min()) >= 0


def test_largest_remainders_by_hand() -> None:
    prediction = torch.tensor([0.25, 0.25, 0.25, 0.25])
    shares = torch.tensor([1.4, 0.8, 1.7, 0.1])
    assert label_counts(prediction - shares / 4, prediction, 4).tolist() == [1, 1, 2, 0]


@pytest.mark.parametrize("seed", range(10))
def test_batches_of_32_on_an_untrained_network(
    seed: int, digits: tuple[Tensor, Tensor], relu_cnn: nn.Sequential, make_upload: Callable[..., CapturedUpload]
) -> None:
    x, y = digits
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    chosen, auxiliary = order[:32], order[100:600]
    target = read([make_upload(relu_cnn, x[chosen], y[chosen])], lambda: relu_cnn, relu_cnn.state_dict(), Knowledge())[0]
    counts = label_counts(class_gradient(target), mean_prediction(relu_cnn, x[auxiliary]), 32)
    assert torch.equal(counts, y[chosen].bincount(minlength=10))


@pytest.mark.few(6)
@pytest.mark.parametrize("n", [8, 32, 64])
@pytest.mark.parametrize("clip", [100.0, 0.1, 0.01])
@pytest.mark.parametrize("layered", [False, True])
def test_a_clip_that_is_told_is_undone(
    layered: bool,
    clip: float,
    n: int,
    digits: tuple[Tensor, Tensor],
    relu_cnn: nn.Sequential,
    make_upload: Callable[..., CapturedUpload],
) -> None:
    x, y = digits
    right = 0
    for seed in range(5):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        chosen, auxiliary = order[:n], order[100:600]
        sent = dict(make_upload(relu_cnn, x[chosen], y[chosen]).tensors)
        bounds = Clip(layers=dict.fromkeys(sent, clip)) if layered else Clip(clip)
        norm = sent["5.bias"].norm() if layered else torch.cat([v.flatten() for v in sent.values()]).norm()
        sent = {k: v * min(1.0, clip / float(norm)) for k, v in sent.items()}
        target = read([CapturedUpload(sent)], lambda: relu_cnn, relu_cnn.state_dict(), Knowledge(clip=bounds))[0]
        right += torch.equal(counted(target, x[auxiliary], n), y[chosen].bincount(minlength=10))
    assert right >= 4


def test_one_label_from_the_bias_and_from_the_weight(
    digits: tuple[Tensor, Tensor], relu_cnn: nn.Sequential, make_upload: Callable[..., CapturedUpload]
) -> None:
    x, y = digits
    for i in range(12):
        sent = make_upload(relu_cnn, x[i : i + 1], y[i : i + 1])
        target = read([sent], lambda: relu_cnn, relu_cnn.state_dict(), Knowledge())[0]
        assert single_label(target) == y[i]
    bare = nn.Sequential(nn.Flatten(), nn.Linear(784, 10, bias=False))
    target = read([make_upload(bare, x[:1], y[:1])], lambda: bare, bare.state_dict(), Knowledge())[0]
    assert single_label(target) == y[0]
    with pytest.raises(ConfigError, match="no bias"):
        class_gradient(target)


def test_unique_labels_of_a_batch(
    digits: tuple[Tensor, Tensor], relu_cnn: nn.Sequential, make_upload: Callable[..., CapturedUpload]
) -> None:
    x, y = digits
    chosen = [int((y == c).nonzero()[0]) for c in (7, 1, 4)]
    target = read([make_upload(relu_cnn, x[chosen], y[chosen])], lambda: relu_cnn, relu_cnn.state_dict(), Knowledge())[0]
    assert unique_labels(target, 3).tolist() == [1, 4, 7]
    with pytest.raises(ConfigError, match="unique"):
        unique_labels(target, 11)


def test_labels_without_auxiliary_data_and_known_labels(
    digits: tuple[Tensor, Tensor], relu_cnn: nn.Sequential, make_upload: Callable[..., CapturedUpload]
) -> None:
    x, y = digits
    target = read([make_upload(relu_cnn, x[:8], y[:8])], lambda: relu_cnn, relu_cnn.state_dict(), Knowledge())[0]
    rng = torch.Generator().manual_seed(0)
    assert torch.equal(infer(target, 8, Knowledge(), BOUNDS, rng), y[:8].sort().values)
    assert torch.equal(infer(target, 8, Knowledge(labels=y[:8]), BOUNDS, rng), y[:8])
    with pytest.raises(ConfigError, match="8 entries for 9"):
        infer(target, 9, Knowledge(labels=y[:8]), BOUNDS, rng)


def test_a_withheld_bias_is_not_read(
    digits: tuple[Tensor, Tensor], relu_cnn: nn.Sequential, make_upload: Callable[..., CapturedUpload]
) -> None:
    x, y = digits
    sent = make_upload(relu_cnn, x[:1], y[:1])
    partial = CapturedUpload({k: v for k, v in sent.tensors.items() if k != "5.bias"})
    with pytest.raises(ConfigError, match=r"5\.bias"):
        class_gradient(read([partial], lambda: relu_cnn, relu_cnn.state_dict(), Knowledge())[0])
