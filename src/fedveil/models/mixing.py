"""Whether a network treats the examples of a batch independently, as DP-SGD assumes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


def mixing_layer(module: nn.Module, x: Tensor) -> str:
    """The first part whose output for one example depends on the other examples of the batch, or an empty string.

    It is a layer, or the module around it where what the layer is handed depends on them already.

    The network runs in the mode that it is in, on batches that share their first example. Its own parameters, statistics and
    random numbers stay as they are.

    Args:
        x: at least two examples [n, ...], numbers or tokens; public, such as those of a test set.
    """
    more = x[torch.arange(5, device=x.device) % len(x)]
    examples, outputs = more[:4], _outputs(module, more[:4])
    by_example = [len(a) == 4 and len(b) == 5 for (_, _, a), (_, _, b) in zip(outputs, _outputs(module, more), strict=False)]
    for others in _other(examples):
        again = _outputs(module, torch.cat([examples[:1], others]))
        for rows, (name, before, one), (_, before_too, other) in zip(by_example, outputs, again, strict=False):
            if rows and _differ(one, other):
                if before is not None and before_too is not None and len(before) == 4 and _differ(before, before_too):
                    return _around(module, name)
                return name
    return ""


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether the first example's rows do, by more than rounding."""
    if one.shape != other.shape:
        return True
    one, other = one[0].double(), other[0].double()
    return not bool(((one - other).abs() <= 1e-4 * float(one.abs().max()) + 1e-6).all())


def _around(module: nn.Module, layer: str) -> str:
    """The module whose forward hands its examples to that layer."""
    name = layer.partition(" ")[0].rpartition(".")[0]
    return f"{name or 'the network'} ({type(module.get_submodule(name)).__name__})"


def _other(examples: Tensor) -> Iterator[Tensor]:
    """Far from the examples after the first; tokens are others of the batch, since there may be no more."""
    if examples.is_floating_point():
        yield from (far * (1 + examples[1:].abs()) for far in (4, -4))
    else:
        yield from (torch.full_like(examples[1:], int(token)) for token in (examples.min(), examples.max()))


def _outputs(module: nn.Module, batch: Tensor) -> list[tuple[str, Tensor | None, Tensor]]:
    """What each layer is handed and makes of the batch, in the order of use; the whole network comes last."""
    network = copy.deepcopy(module)
    seen: list[tuple[str, Tensor | None, Tensor]] = []

    def keep(layer: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.dim():
            first = inputs[0] if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].dim() else None
            before = None if first is None else first.detach().clone()
            seen.append((f"{names[layer]} ({type(layer).__name__})", before, output.detach().clone()))

    names = {layer: name or "the network" for name, layer in network.named_modules()}
    for layer in names:
        layer.register_forward_hook(keep)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        network(batch)
    return seen
