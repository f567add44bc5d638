"""Whether a network treats the examples of a batch independently, as DP-SGD assumes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


def mixing_layer(module: nn.Module, x: Tensor) -> str:
    """The first layer whose output for one example depends on the other examples of the batch, or an empty string.

    The network runs in the mode that it is in, on batches that share their first example. Its own parameters, statistics and
    random numbers stay as they are.

    Args:
        x: at least two examples [n, ...], numbers or tokens; public, such as those of a test set.
    """
    more = x[torch.arange(5, device=x.device) % len(x)]
    examples, outputs = more[:4], _outputs(module, more[:4])
    by_example = [len(one) == 4 and len(five) == 5 for (_, one), (_, five) in zip(outputs, _outputs(module, more), strict=False)]
    for others in _other(examples):
        again = _outputs(module, torch.cat([examples[:1], others]))
        for rows, (name, one), (_, other) in zip(by_example, outputs, again, strict=False):
            scale = 1e-4 * float(one[0].abs().max()) + 1e-6 if rows else 0.0
            if rows and not (one.shape == other.shape and bool(((one[0] - other[0]).abs() <= scale).all())):
                return name
    return ""


def _other(examples: Tensor) -> Iterator[Tensor]:
    """Far from the examples after the first; tokens are others of the batch, since there may be no more."""
    if examples.is_floating_point():
        yield from (far * (1 + examples[1:].abs()) for far in (4, -4))
    else:
        yield from (torch.full_like(examples[1:], int(token)) for token in (examples.min(), examples.max()))


def _outputs(module: nn.Module, batch: Tensor) -> list[tuple[str, Tensor]]:
    """What each layer makes of the batch, in the order of use; the whole network comes last."""
    network = copy.deepcopy(module)
    seen: list[tuple[str, Tensor]] = []

    def keep(layer: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.dim():
            seen.append((f"{names[layer]} ({type(layer).__name__})", output.detach().clone()))

    names = {layer: name or "the network" for name, layer in network.named_modules()}
    for layer in names:
        layer.register_forward_hook(keep)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        network(batch)
    return seen
