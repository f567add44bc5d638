"""Whether a network treats the examples of a batch independently, as one must that DP-SGD trains example by example."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


def mixing_layer(module: nn.Module, x: Tensor, every: bool = False) -> str:
    """The first part whose output for one example depends on the other examples of the batch, or an empty string.

    It is a layer, or the module around it where what the layer is handed depends on them already. `every` layer is looked at, or
    where the output of the whole network shows it: inside, a network may have the examples in another order.

    The network runs in the mode that it is in, on batches that share their first example; once more with its trained parameters
    moved a little, since a layer that starts at zero hides all before it. Its own parameters, statistics and random numbers stay
    as they are.

    Args:
        x: at least two examples [n, ...], numbers or tokens; public, such as those of a test set.
    """
    moved = _moved(module)
    networks = (module, moved) if _finite(moved, x) else (module,)
    if every:
        return next(filter(None, (_mixing(network, x) for network in networks)), "")
    for network in networks:
        if _mixes(network, x):
            try:
                return _mixing(network, x) or _whole(module)
            except Exception:  # of a layer that takes no hooks
                return _whole(module)
    return ""


def drawn_elsewhere(module: nn.Module, x: Tensor) -> str:
    """Where, other than from torch, the network draws random numbers, or an empty string; those of torch come from the run."""
    before = _states()
    _output(module, x[:2])
    return " and ".join(name for name, state in _states().items() if state != before[name])


def _states() -> dict[str, str]:
    return {"random": repr(random.getstate()), "numpy.random": repr(np.random.get_state())}  # noqa: NPY002 : what is looked for


def _moved(module: nn.Module) -> nn.Module:
    moved = copy.deepcopy(module)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in moved.parameters():
            if p.requires_grad:
                p.add_(0.02 * torch.randn(p.shape, generator=draw).to(p.device))
    return moved


def _finite(module: nn.Module, x: Tensor) -> bool:
    examples = x[torch.arange(4, device=x.device) % len(x)]
    return all(bool(_output(module, torch.cat([examples[:1], others])).isfinite().all()) for others in _other(examples))


def _mixes(module: nn.Module, x: Tensor) -> bool:
    """Whether the output of the whole network for the first example changes with the others."""
    examples = x[torch.arange(4, device=x.device) % len(x)]
    own = _output(module, examples)
    return any(_differ(own, _output(module, torch.cat([examples[:1], others]))) for others in _other(examples))


def _mixing(module: nn.Module, x: Tensor) -> str:
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
    if not one.numel():
        return False
    one, other = one[0].double(), other[0].double()
    return not bool(((one - other).abs() <= 1e-4 * float(one.abs().max()) + 1e-6).all())


def _around(module: nn.Module, layer: str) -> str:
    """The module whose forward hands its examples to that layer."""
    name = layer.partition(" ")[0].rpartition(".")[0]
    return f"{name} ({type(module.get_submodule(name)).__name__})" if name else _whole(module)


def _whole(module: nn.Module) -> str:
    return f"the network ({type(module).__name__})"


def _other(examples: Tensor) -> Iterator[Tensor]:
    """Far from the examples after the first; tokens are others of the batch, since there may be no more."""
    if examples.is_floating_point():
        yield from (far * (1 + examples[1:].abs()) for far in (4, -4))
    else:
        yield from (torch.full_like(examples[1:], int(token)) for token in (examples.min(), examples.max()))


def _output(module: nn.Module, batch: Tensor) -> Tensor:
    """Of the whole network, which stays as it is."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        output: Tensor = copy.deepcopy(module)(batch.clone())
    return output


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
        network(batch.clone())  # into which it may write
    return seen
