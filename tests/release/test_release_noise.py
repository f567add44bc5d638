"""Secret normals: the right law, the right number, and every block drawn anew, with one thread and with several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from scipy import stats

from fedveil.release import noise
from fedveil.release.noise import Randomness


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_secret_normals_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_BLOCK", 40_001)
    n = 3 * 40_001 + 7
    x = Randomness(0).normal(n, 0, 0)
    assert x.shape == (n,)
    assert x.dtype == torch.float32
    assert stats.kstest(x.numpy(), "norm").pvalue > 1e-6
    assert float(x.double().std()) == pytest.approx(1.0, abs=6 / (2 * n) ** 0.5)
    blocks = x[: 3 * 40_001].view(3, -1).double()
    between = torch.corrcoef(blocks) - torch.eye(3)
    assert float(between.abs().max()) < 6 / 40_001**0.5
    assert not torch.equal(x, Randomness(0).normal(n, 0, 0))


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_few_normals(n: int) -> None:
    assert Randomness(0).normal(n, 0, 0).shape == (n,)
