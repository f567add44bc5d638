"""The constraints that a rotation of each layer leaves: by hand, and that they hold at the truth."""

from __future__ import annotations

import math

import pytest
import torch

from fedveil.attacks.reconstruction import constraint
from fedveil.papers.fedanc.baselines import candidate


def test_constraint_by_hand() -> None:
    received = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2), "c": torch.tensor([2.0])}
    found = {"a": torch.tensor([6.0, 8.0]), "b": torch.tensor([1.0, 1.0]), "c": torch.tensor([-2.0])}
    # a: twice the norm, cosine 1; b: nothing received; c: the same norm, cosine -1
    assert float(constraint(received, found, aligned=False)) == pytest.approx((math.log(2) ** 2 + 1 + 1) / 2, rel=1e-6)
    assert float(constraint(received, found, aligned=True)) == pytest.approx(math.log(2) ** 2 / 2, abs=1e-6)


@pytest.mark.parametrize(("form", "aligned", "norm"), [("paper", False, 1.0), ("repo", False, 1.0), ("repo", True, 1e4)])
def test_the_gradient_itself_meets_the_constraint(form: str, aligned: bool, norm: float) -> None:
    """Orthogonal; with the public code for norm 1 only, and for large norms it is the gradient up to its sign."""
    rng = torch.Generator().manual_seed(0)
    gradient = {
        name: torch.nn.functional.normalize(torch.randn(n, generator=rng), dim=0) * norm for name, n in (("a", 20), ("b", 7))
    }
    sent = candidate(list(gradient.values()), rng, form)  # type: ignore[arg-type]
    received = dict(zip(gradient, torch.split(sent, [20, 7]), strict=True))
    assert float(constraint(received, gradient, aligned=aligned)) < 1e-4
    other = {name: torch.randn(len(g), generator=rng) * norm for name, g in gradient.items()}
    assert float(constraint(received, other, aligned=aligned)) > 0.1
