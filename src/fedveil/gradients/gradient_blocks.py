"""The per-example gradients of a batch by parameter, in factored form where possible; their norms and sums.

Each entry of a gradient is one float32 number or one product of two, so nothing cancels after rounding. The errors of norms and
sums in float64 therefore stay below the charged amount (docs/exact-release.md) for any number of places in an example.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Block(Protocol):
    """One parameter's gradient, of k coordinates, for each of n examples."""

    def squares(self) -> Tensor:
        """Return the squared L2 norms [n], in float64."""
        ...

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum [k] of the gradients, weighted by `weights` [n], in float64."""
        ...

    def rows(self) -> Tensor:
        """Return the gradients [n, k]."""
        ...

    def without(self, where: Tensor) -> Block:
        """Return the block with the gradients of some examples [n] set to zero."""
        ...


@dataclass(frozen=True)
class Dense:
    """Gradients [n, k] in dense form."""

    values: Tensor

    def squares(self) -> Tensor:
        size: Tensor = torch.linalg.vector_norm(self.values, dim=1, dtype=torch.float64)
        return size.square()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return weights @ self.values.double()

    def rows(self) -> Tensor:
        return self.values

    def without(self, where: Tensor) -> Dense:
        return Dense(self.values.masked_fill(where[:, None], 0.0))


@dataclass(frozen=True)
class Products:
    """Outer products: `left` [n, o] and `right` [n, i] stand for [n, o * i]."""

    left: Tensor
    right: Tensor

    def squares(self) -> Tensor:
        return self.left.double().square().sum(1) * self.right.double().square().sum(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return ((self.left.double() * weights[:, None]).T @ self.right.double()).flatten()

    def rows(self) -> Tensor:
        return (self.left[:, :, None] * self.right[:, None, :]).flatten(1)

    def without(self, where: Tensor) -> Products:
        return Products(*(part.masked_fill(where[:, None], 0.0) for part in (self.left, self.right)))


def products(left: Tensor, right: Tensor) -> Block:
    """Sums over places of outer products of `left` [n, places, o] and `right` [n, places, i]."""
    if left.shape[1] == 1:
        return Products(left[:, 0], right[:, 0])
    return Dense((left.mT @ right).flatten(1))


@dataclass(frozen=True)
class Lookups:
    """Gradients of a table with `height` rows: row `index` [n, places] has the gradient `values` [n, places, width].

    If an example uses a row more than once, the first place has the sum and the others have zero.
    """

    index: Tensor
    values: Tensor
    height: int

    def squares(self) -> Tensor:
        return self.values.double().square().sum((1, 2))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        table = self.values.new_zeros(self.height, self.values.shape[2], dtype=torch.float64)
        weighted = self.values.double() * weights[:, None, None]
        return table.index_add_(0, self.index.flatten(), weighted.flatten(0, 1)).flatten()

    def rows(self) -> Tensor:
        n, _, width = self.values.shape
        tables = self.values.new_zeros(n * self.height, width)
        shifted = self.index + self.height * torch.arange(n, device=self.index.device)[:, None]
        return tables.index_add_(0, shifted.flatten(), self.values.flatten(0, 1)).view(n, -1)

    def without(self, where: Tensor) -> Lookups:
        return Lookups(self.index, self.values.masked_fill(where[:, None, None], 0.0), self.height)


def lookups(index: Tensor, slopes: Tensor, height: int) -> Lookups:
    """Add each of `slopes` [n, places, width] to its row; the sum for one row is complete before it is stored."""
    n, places = index.shape
    first = _first_places(index) + places * torch.arange(n, device=index.device)[:, None]
    values = slopes.new_zeros(n * places, slopes.shape[2]).index_add_(0, first.flatten(), slopes.flatten(0, 1))
    return Lookups(index, values.view_as(slopes), height)


def _first_places(index: Tensor) -> Tensor:
    """Return the place in its row at which each number of `index` [n, places] stands first."""
    ordered, order = index.sort(dim=1, stable=True)
    begins = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
    places = torch.arange(index.shape[1], device=index.device).expand_as(index)
    run = places.where(begins, 0).cummax(1).values
    return torch.zeros_like(order).scatter(1, order, order.gather(1, run))


def combined(parts: Sequence[Block]) -> Block:
    """Return the sum of the contributions of the uses of one parameter."""
    if len(parts) == 1:
        return parts[0]
    return Dense(torch.stack([part.rows() for part in parts]).sum(0))


# --- all parameters ----------------------------------------------------------------------------------------------------


def norms(blocks: Sequence[Block]) -> Tensor:
    """Return the L2 norm of each example's gradient [n], in float64."""
    return torch.stack([block.squares() for block in blocks]).sum(0).sqrt()


def weighted_sum(blocks: Sequence[Block], weights: Tensor) -> Tensor:
    """Return the sum of the examples' gradients, weighted by `weights` [n], as a flat vector [d] in float64."""
    return torch.cat([block.weighted_sum(weights) for block in blocks])


def rows(blocks: Sequence[Block]) -> Tensor:
    """Return the flat gradient of each example [n, d]."""
    return torch.cat([block.rows() for block in blocks], dim=1)


def clipped_sum(blocks: Sequence[Block], clip: float | Tensor, count: int | None = None, most: float = 1.0) -> Tensor:
    """Return the sum [d] of the first `count` examples' gradients (by default all), each scaled and clipped, in float64.

    An example whose gradient is not finite counts as zero.

    Args:
        clip: the bound on the L2 norm of each, or one for each example [n]. most: factor of each gradient before the clip.
    """
    size = norms(blocks)
    if len(size) and not math.isfinite(float(size.max())):  # NaN if a norm is NaN
        wrong = ~size.isfinite()
        blocks = [block.without(wrong) for block in blocks]
        size = size.masked_fill(wrong, math.inf)
    weights = (clip / size.clamp_min(1e-300)).clamp_max(most)
    if count is not None:
        weights[count:] = 0.0
    return weighted_sum(blocks, weights)
