"""The growth of masks, of methods whose clients send different coordinates."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.training.params import Layout


def grown(mask: Tensor, size: Tensor, layout: Layout, share: float) -> Tensor:
    """`mask` [d] with the largest of the other coordinates by `size` [d] added, until it holds `share` of each layer.

    A layer that already holds that share stays as it is; the number of coordinates is rounded down.
    """
    new = mask.clone()
    for part, values, n in zip(layout.split(new), layout.split(size), layout.sizes, strict=True):
        missing = int(share * n + 1e-9) - int(part.sum())
        if missing > 0:
            part[values.masked_fill(part, -1.0).topk(missing).indices] = True
    return new
