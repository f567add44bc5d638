"""The table of LaDP-FL's page that needs no training: the noise of 400 rounds by the formulas of the arms."""

from __future__ import annotations

import math
from pathlib import Path

from fedveil.accounting.gaussian import classical_noise_multiplier
from fedveil.papers.ladp_fl.claim import constant_as_printed, sensitivity_theorem2

PAGE = (Path(__file__).parents[2] / "docs" / "papers" / "ladp-fl.md").read_text()
ROUNDS, DELTA, UPLOADS = 400, 0.02, 10
RESNET18, CNN = 11_173_962, 2_156_490


def summed(std: float, weights: int) -> float:
    """The expected norm of the noise on a mean of ten uploads, over all rounds."""
    return ROUNDS * std * math.sqrt(weights / UPLOADS)


def test_noise_by_the_formulas() -> None:
    reach = sensitivity_theorem2(0.1, 2, 20.0)
    falling = sum(0.9979**t for t in range(ROUNDS)) / ROUNDS
    allocated = sum(0.9955 ** (t / 4) for t in range(ROUNDS)) / ROUNDS
    for epsilon in (0.2, 0.5):
        std = classical_noise_multiplier(epsilon, DELTA) * reach
        full = summed(std, RESNET18)
        least = summed(constant_as_printed(epsilon, DELTA) * reach / epsilon, RESNET18)
        numbers = (full, summed(std, CNN), full * falling, full * allocated)
        wanted = [f"| {number:,.0f} |" for number in numbers] + [f"| {least:,.0f} to {4 * least:,.0f} |"]
        assert [text for text in wanted if text not in PAGE] == []
    assert f"| Time-Varying DP | {falling:.3f} |" in PAGE
    assert f"| DPA LDP | {allocated:.3f} |" in PAGE
