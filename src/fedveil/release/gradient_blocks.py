"""The gradients of a batch's examples, parameter by parameter, multiplied out no further than needed; their norms and sums.

A layer that works on many places of an example, such as the tokens of a text, has a gradient that is a sum over places of outer
products. Its norm follows from two small matrices of inner products and the sum over a batch is one matrix product, so that no
example's gradient is ever formed ("ghost clipping", Li et al. 2022; docs/exact-release.md has what rounding does to it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

SLACK = 2.0**-16
"""The part of the clip that pays for the rounding of sums over places."""
_CANCELLATION = 2.0**8
"""How many times the clip the terms of one example may weigh in such a sum before they cancel."""
_ROUNDOFF = 2.0**-53
_FAST = 2**22
"""As many numbers are multiplied out sooner than their inner products, which need float64, are computed."""


class Block(Protocol):
    """One parameter's gradient, of k coordinates, for each of n examples."""

    def squares(self) -> tuple[Tensor, Tensor | None]:
        """Squared L2 norms [n] in float64, at least the true ones but for the error that is charged for.

        And the squared sum of the norms of the terms that were added up to each gradient, or None for a single term.
        """
        ...

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum [k] of the gradients by `weights` [n], in float64."""
        ...

    def rows(self) -> Tensor:
        """The gradients themselves [n, k]."""
        ...

    def without(self, where: Tensor) -> Block:
        """The same with the gradients of some examples [n] set to zero."""
        ...


@dataclass(frozen=True)
class Dense:
    """The gradients [n, k] themselves."""

    values: Tensor

    def squares(self) -> tuple[Tensor, None]:
        return torch.linalg.vector_norm(self.values, dim=1, dtype=torch.float64).square(), None

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return weights @ self.values.double()

    def rows(self) -> Tensor:
        return self.values

    def without(self, where: Tensor) -> Dense:
        return Dense(self.values.masked_fill(where[:, None], 0.0))


@dataclass(frozen=True)
class Products:
    """Sums over places of outer products: `left` [n, places, o] and `right` [n, places, i] stand for [n, o * i]."""

    left: Tensor
    right: Tensor

    @cached_property
    def _doubles(self) -> tuple[Tensor, Tensor]:
        return self.left.double(), self.right.double()

    def squares(self) -> tuple[Tensor, Tensor | None]:
        left, right = self._doubles
        if self.left.shape[1] == 1:
            return left.square().sum((1, 2)) * right.square().sum((1, 2)), None
        return _ghost(left @ left.mT, right @ right.mT, self.left.shape[2] + self.right.shape[2])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        left, right = self._doubles
        return ((left * weights[:, None, None]).flatten(0, 1).T @ right.flatten(0, 1)).flatten()

    def rows(self) -> Tensor:
        return (self.left.mT @ self.right).flatten(1)

    def without(self, where: Tensor) -> Products:
        return Products(*(part.masked_fill(where[:, None, None], 0.0) for part in (self.left, self.right)))


@dataclass(frozen=True)
class Lookups:
    """Rows of a table with `height` rows: `slopes` [n, places, width] are added to the rows `index` [n, places]."""

    index: Tensor
    slopes: Tensor
    height: int

    def squares(self) -> tuple[Tensor, Tensor | None]:
        slopes = self.slopes.double()
        same = self.index[:, :, None] == self.index[:, None, :]
        return _ghost(slopes @ slopes.mT, same.double(), self.slopes.shape[2])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        table = self.slopes.new_zeros(self.height, self.slopes.shape[2], dtype=torch.float64)
        weighted = self.slopes.double() * weights[:, None, None]
        return table.index_add_(0, self.index.flatten(), weighted.flatten(0, 1)).flatten()

    def rows(self) -> Tensor:
        n, _, width = self.slopes.shape
        tables = self.slopes.new_zeros(n * self.height, width)
        shifted = self.index + self.height * torch.arange(n, device=self.index.device)[:, None]
        return tables.index_add_(0, shifted.flatten(), self.slopes.flatten(0, 1)).view(n, -1)

    def without(self, where: Tensor) -> Lookups:
        return Lookups(self.index, self.slopes.masked_fill(where[:, None, None], 0.0), self.height)


def _ghost(left: Tensor, right: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """Squared norms, rounded up, of sums over places from the inner products [n, places, places] of their factors.

    With A the sum of the norms of the terms, the computed square errs by at most gamma_m A^2, m = `terms` + places^2 + 2; twice
    that is added.
    """
    places = left.shape[1]
    spread = (left.diagonal(dim1=1, dim2=2) * right.diagonal(dim1=1, dim2=2)).sqrt().sum(1).square()
    error = 2 * (terms + places**2 + 8) * _ROUNDOFF
    return (left * right).sum((1, 2)).clamp_min(0) + error * spread, spread


# --- the parts of one parameter ----------------------------------------------------------------------------------------


def combined(parts: Sequence[Block]) -> Block:
    """The sum of the parts that one parameter's uses contribute, in the form that costs least."""
    return _settled(reduce(_added, parts))


def _added(one: Block, other: Block) -> Block:
    if isinstance(one, Products) and isinstance(other, Products):
        return Products(torch.cat((one.left, other.left), 1), torch.cat((one.right, other.right), 1))
    if isinstance(one, Lookups) and isinstance(other, Lookups):
        return Lookups(torch.cat((one.index, other.index), 1), torch.cat((one.slopes, other.slopes), 1), one.height)
    return Dense(one.rows() + other.rows())


def _settled(block: Block) -> Block:
    """Multiplied out where that is faster, or where rounding could exceed the slack: n gamma_(n places + 2) 2^8 > SLACK / 2."""
    if isinstance(block, Products):
        (n, places, o), i = block.left.shape, block.right.shape[2]
        if places == 1:
            return block
    elif isinstance(block, Lookups):
        (n, places, i), o = block.slopes.shape, block.height
    else:
        return block
    small = n * o * i <= _FAST or places * (o + i) > o * i
    exact = n * (n * places + 2) <= SLACK / 2 / _CANCELLATION / _ROUNDOFF / 2
    return Dense(block.rows()) if small or not exact else block


# --- all parameters ----------------------------------------------------------------------------------------------------


def norms(blocks: Sequence[Block]) -> Tensor:
    """The L2 norm of each example's gradient [n], in float64."""
    return _norms(blocks)[0]


def _norms(blocks: Sequence[Block]) -> tuple[Tensor, Tensor | None]:
    """Norms [n], and the norms of what is added up over places [n] where anything is."""
    found = [block.squares() for block in blocks]
    squares = [square for square, _ in found]
    size = torch.stack(squares).sum(0).sqrt()
    if all(spread is None for _, spread in found):
        return size, None
    return size, torch.stack([square if spread is None else spread for square, spread in found]).sum(0).sqrt()


def weighted_sum(blocks: Sequence[Block], weights: Tensor) -> Tensor:
    """The sum of the examples' gradients by `weights` [n], as a flat vector [d], in float64."""
    return torch.cat([block.weighted_sum(weights) for block in blocks])


def rows(blocks: Sequence[Block]) -> Tensor:
    """The flat gradient of each example [n, d]."""
    return torch.cat([block.rows() for block in blocks], dim=1)


def clipped_sum(blocks: Sequence[Block], clip: float) -> Tensor:
    """The sum [d] of the examples' gradients, each clipped to L2 norm `clip`, in float64.

    An example whose gradient is not finite counts as zero. Where gradients are sums over places, the clip is smaller by SLACK,
    and an example counts less whose terms would weigh more than 2^8 clips and cancel.
    """
    size, spread = _norms(blocks)
    if spread is not None:
        size = torch.maximum(size / (1 - SLACK), spread / _CANCELLATION)
    finite = size.isfinite()
    if not bool(finite.all()):
        blocks = [block.without(~finite) for block in blocks]
    factors = (clip / size.clamp_min(1e-300)).clamp_max(1.0).where(finite, size.new_zeros(()))
    return weighted_sum(blocks, factors)
