"""What FedDPA and FedADDP share: a client's personal coordinates by its Fisher information, and the pulls of their two losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedveil.errors import ConfigError
from fedveil.methods.base import Setting
from fedveil.training.local import Local

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.gradients.gradient_blocks import Block
    from fedveil.training.params import Layout

_NUMBERS = 2**24
"""Numbers of per-example gradients that are held at once."""


@dataclass(frozen=True)
class Split:
    """A client's coordinates [d]: `personal`, the merged model `first` that training starts from, and what either loss trains."""

    personal: Tensor
    first: Tensor
    trains_personal: Tensor
    trains_shared: Tensor


def fisher_split(local: Local, s: Setting, threshold: float, *, skip_zeros: bool) -> Split:
    """Personal where the scaled Fisher information of the client's last model on its data exceeds the threshold.

    Args:
        skip_zeros: as the two programs do, which find either part by what is not zero: a weight of exactly zero is not trained.
    """
    import torch

    if not local.examples:
        nowhere = torch.zeros_like(local.start, dtype=torch.bool)
        return Split(nowhere, local.start, nowhere, nowhere)
    own: Tensor = local.state.get("personal", local.start)
    local.model.load(own)
    personal = scaled(fisher(local, s), local.model.layout) > threshold
    first = own.where(personal, local.start)
    local.model.load(first)
    trains = (personal, ~personal)
    if skip_zeros:
        trains = (trains[0] & (own != 0), trains[1] & (local.start != 0))
    return Split(personal, first, *trains)


def fisher(local: Local, s: Setting) -> Tensor:
    """The mean over the client's examples of the squared gradient [d] of each one's loss at the present model, by coordinate."""
    import torch

    from fedveil.gradients.per_example import per_example_gradients

    assert local.data is not None
    total, size = torch.zeros_like(local.start), max(2, min(64, _NUMBERS // local.model.layout.dimension))
    local.model.eval()
    try:
        for x, y in zip(*(torch.split(part, size) for part in local.data), strict=True):
            blocks, _ = per_example_gradients(local.model.module, x, y, s.task.losses_in_full, loop=local.spec.loop)
            total += torch.cat([_summed_squares(block) for block in blocks])
    finally:
        local.model.train()
    return total / local.examples


def _summed_squares(block: Block) -> Tensor:
    """The sum over the examples of their squared gradients [k]; outer products are never multiplied out."""
    from fedveil.gradients.gradient_blocks import Products

    if isinstance(block, Products):
        return (block.left.square().T @ block.right.square()).flatten()
    return block.rows().square().sum(0)


def scaled(values: Tensor, layout: Layout) -> Tensor:
    """Each tensor's values [d] from 0 to 1; 0 where they are all the same (the programs divide 0 by 0 there)."""
    import torch

    low = torch.stack([part.min() for part in layout.split(values)])
    span = torch.stack([part.max() for part in layout.split(values)]) - low
    return (values - layout.expand(low)) / layout.expand(span.where(span > 0, torch.ones_like(span)))


def pull(moved: Tensor, layout: Layout) -> Tensor:
    """The gradient [d] of the sum of the layers' norms of `moved` [d]; 0 where a layer has not moved."""
    return moved / layout.expand(layout.norms(moved).clamp_min(1e-30))


def pull_to(moved: Tensor, layout: Layout, length: float) -> Tensor:
    """The gradient [d] of | sum of the layers' norms of `moved` - length |."""
    return pull(moved, layout) * (layout.norms(moved).sum() - length).sign()


def check_split(s: Setting, name: str) -> None:
    """An error for weight decay, which would move both parts in either step, and for a loss that no example has alone.

    Raises:
        ConfigError: with what to change.
    """
    if not s.task.by_example:
        raise ConfigError(
            f"{name} chooses coordinates by the gradients of single examples, and the loss of task.name = {s.task.name!r} is not "
            f"a mean over examples: choose another method, or a loss that is one"
        )
    if s.local.optimizer.weight_decay:
        raise ConfigError(f"{name} steps two parts of a model in turn, weight decay moves both: set weight_decay = 0")
