from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedveil.attacks import metrics
from fedveil.errors import ConfigError


def _waves(height: int, width: int, channels: int) -> tuple[Tensor, Tensor]:
    i, j, k = np.meshgrid(np.arange(height), np.arange(width), np.arange(channels), indexing="ij")
    first = (np.sin(i * 0.7 + k) * np.cos(j * 0.3 - k) + 1) / 2
    second = np.clip(first * 0.8 + 0.15 * (((i * 7 + j * 13) % 11) / 10), 0, 1)
    as_images = [torch.tensor(v).permute(2, 0, 1).unsqueeze(0) for v in (first, second)]
    return as_images[0], as_images[1]


# From scikit-image 0.26.0: structural_similarity(gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
# data_range=1, channel_axis=-1) and peak_signal_noise_ratio(data_range=1). Its default SSIM of the same pairs: .9502, .9501.
@pytest.mark.parametrize(
    ("size", "ssim", "psnr"),
    [((28, 28, 1), 0.9400623294655771, 22.814846190363042), ((32, 24, 3), 0.9401512015670707, 22.665655018612313)],
)
def test_ssim_and_psnr_equal_scikit_image(size: tuple[int, int, int], ssim: float, psnr: float) -> None:
    first, second = _waves(*size)
    assert metrics.ssim(first, second).item() == pytest.approx(ssim, abs=1e-12)
    assert metrics.psnr(first, second).item() == pytest.approx(psnr, abs=1e-10)


def test_mse_mae_psnr_by_hand() -> None:
    truth = torch.zeros(2, 1, 2, 2)
    images = torch.tensor([[[[0.1, 0.1], [0.1, 0.1]]], [[[1.0, 0.0], [0.0, 0.0]]]])
    assert metrics.mse(images, truth).tolist() == pytest.approx([0.01, 0.25])
    assert metrics.mae(images, truth).tolist() == pytest.approx([0.1, 0.25])
    assert metrics.psnr(images, truth).tolist() == pytest.approx([20.0, -10 * math.log10(0.25)], abs=1e-5)


def test_psnr_of_equal_images_is_capped() -> None:
    assert metrics.psnr(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)).item() == pytest.approx(120)


def test_ssim_is_one_on_itself_and_negative_on_the_inverse() -> None:
    image, _ = _waves(20, 20, 1)
    assert metrics.ssim(image, image).item() == pytest.approx(1)
    assert metrics.ssim(image, 1 - image).item() < -0.5


@given(st.permutations(range(5)))
def test_matched_undoes_any_order(order: list[int]) -> None:
    truth = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 1, 2, 2) / 5
    assert torch.equal(metrics.matched(truth[order] + 0.01, truth), truth + 0.01)


def test_matched_minimises_the_total_not_each() -> None:
    truth = torch.tensor([0.0, 0.5]).view(2, 1, 1, 1)
    images = torch.tensor([0.4, 0.2]).view(2, 1, 1, 1)
    assert metrics.matched(images, truth).flatten().tolist() == pytest.approx([0.2, 0.4])


def test_scores_report_success_and_medians() -> None:
    truth = torch.zeros(3, 1, 12, 12)
    images = torch.stack([torch.full((1, 12, 12), v) for v in (0.0, 0.09, 0.5)])
    summary = metrics.score(images, truth).summary()
    assert summary["success_rate_20dB"] == pytest.approx(2 / 3)
    assert summary["mae_median"] == pytest.approx(0.09)
    assert summary["mae_mean"] == pytest.approx(0.59 / 3)


def test_floors_name_what_no_upload_gives(digits: tuple[Tensor, Tensor]) -> None:
    x, _ = digits
    floors = metrics.floors(x[:10], x[500:1500])
    medians = {name: float(np.median(scores.psnr)) for name, scores in floors.items()}
    assert medians["mean image"] > medians["other image"] > medians["uniform"]
    assert all(s.success == 0 for s in floors.values())
    assert metrics.score(x[:2, 0, 0], x[:2, 0, 0]).ssim is None


@pytest.mark.parametrize("bad", [-0.01, 1.01, math.nan])
def test_images_out_of_range_are_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="clamps"):
        metrics.psnr(torch.full((1, 1, 2, 2), bad), torch.zeros(1, 1, 2, 2))


def test_shapes_that_differ_and_small_images_are_refused() -> None:
    with pytest.raises(ConfigError, match="one shape"):
        metrics.mse(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 3))
    with pytest.raises(ConfigError, match=">= 11"):
        metrics.ssim(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8))
