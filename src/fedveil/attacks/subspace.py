"""Against defences that rotate each layer's gradient and keep its norm, such as CENSOR: match what a rotation leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedveil.attacks.inverting import IG
from fedveil.attacks.matching import Target
from fedveil.attacks.simulate import split
from fedveil.training.params import trained_parameters


@dataclass(frozen=True)
class Subspace(IG):
    """IG whose candidates have each layer's received norm, and a gradient orthogonal to what was received.

    Labels cannot be read off such an upload: they come from what is left of the last bias, unless they are known.
    aligned: instead, gradients along what was received, up to the sign, as a projection that divides by the norm once leaves
    large gradients. Other fields as in `IG`.
    """

    name: ClassVar[str] = "subspace"
    aligned: bool = False

    def _distance(self, target: Target, candidate: Tensor) -> Tensor:
        return constraint(target.named(), split(candidate, trained_parameters(target.module)), aligned=self.aligned)


def constraint(received: dict[str, Tensor], candidate: dict[str, Tensor], *, aligned: bool) -> Tensor:
    """Mean over the layers of log(|candidate| / |received|)^2 + cos^2, or 1 - |cos| if `aligned`; zeros do not count."""
    terms = []
    for name, o in received.items():
        if not bool(o.any()):
            continue
        g = candidate[name]
        size, norm = (g.square().sum() + 1e-30).sqrt(), o.norm()
        cosine = (g * o).sum() / (size * norm)
        terms.append((size / norm).log().square() + (1 - cosine.abs() if aligned else cosine.square()))
    return torch.stack(terms).mean()
