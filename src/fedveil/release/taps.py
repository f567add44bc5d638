"""Taps: what a forward pass leaves behind for the gradients of single examples.

Where a layer's output is linear in its parameters, an example's gradient follows from the slope of its loss at that output and
from what the layer saw. Known layers compute with constants in place of their parameters and leave a tap at such an output. A
parameter that enters the loss in any other way still gets a gradient of its own, which is how that is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedveil.release.gradient_blocks import Block, Dense, lookups, products

if TYPE_CHECKING:
    from torch import Tensor

Rule = Callable[..., Any]
"""(taps, layer, the arguments of its forward) -> what its forward returns; raises NotByHand where it does not fit."""


class NotByHand(Exception):
    """The rules do not fit what the network does."""


@dataclass(frozen=True)
class Examples:
    """Where the examples are: `n` of them along one dimension of a tapped output, each with `fold` entries in a row there."""

    n: int
    dim: int = 0
    fold: int = 1

    @classmethod
    def found(cls, alone: Sequence[int], batch: Sequence[int], n: int) -> Examples | None:
        """From the shapes of an output for one example and for n: they differ in one dimension, which is n times as long."""
        if len(alone) == len(batch):
            differ = [i for i in range(len(alone)) if alone[i] != batch[i]]
            if len(differ) == 1 and batch[differ[0]] == n * alone[differ[0]]:
                return cls(n, differ[0], alone[differ[0]])
        return None

    def first(self, values: Tensor) -> Tensor:
        """The values with the examples as first dimension, [n, ...]; what is folded comes next to where they were."""
        parts = values if self.fold == 1 else torch.unflatten(values, self.dim, (self.n, self.fold))
        return parts.movedim(self.dim, 0)

    def places(self, values: Tensor) -> Tensor:
        """The values [..., k] as [n, places, k]."""
        return self.first(values).reshape(self.n, -1, values.shape[-1])


# --- how a parameter gets its gradient from the slope at a tap -----------------------------------------------------------

Use = Callable[["Tensor", Examples], Block]


def product(inputs: Tensor | Callable[[], Tensor], slopes: Callable[[Tensor], Tensor] = lambda slope: slope) -> Use:
    """For the weight of a linear map of `inputs` [..., i], which a rule may know only after the pass."""

    def use(slope: Tensor, examples: Examples) -> Block:
        seen = inputs() if callable(inputs) else inputs
        slope = slopes(slope)
        return products(examples.places(slope), examples.places(seen.detach().to(slope.dtype)))

    return use


def scale(inputs: Tensor | None = None, slopes: Callable[[Tensor], Tensor] = lambda slope: slope, size: int = 0) -> Use:
    """For what multiplies `inputs` along the last dimension, or along the last few, of `size` coordinates; None for a bias."""

    def use(slope: Tensor, examples: Examples) -> Block:
        slope = slopes(slope)
        each = examples.first(slope if inputs is None else slope * inputs)
        return Dense(each.reshape(examples.n, -1, size or slope.shape[-1]).sum(1))

    return use


def channel_scale(inputs: Tensor | None = None) -> Use:
    """The same along the channels of [batch, channels, ...]."""

    def use(slope: Tensor, examples: Examples) -> Block:
        if examples.dim:
            raise NotByHand
        each = (slope if inputs is None else slope * inputs).reshape(*slope.shape[:2], -1).sum(2)
        return Dense(each if examples.fold == 1 else each.view(examples.n, examples.fold, -1).sum(1))

    return use


def lookup(index: Tensor, height: int, padding: int | None = None) -> Use:
    """For a table of `height` rows of which `index` [...] were looked up; the row `padding` gets no gradient."""

    def use(slope: Tensor, examples: Examples) -> Block:
        slopes = slope if padding is None else slope.masked_fill((index == padding)[..., None], 0.0)
        return lookups(examples.places(index[..., None])[..., 0], examples.places(slopes), height)

    return use


# --- the pass ----------------------------------------------------------------------------------------------------------


@dataclass
class Tap:
    """An output, and how each parameter behind it gets its gradient from the slope there."""

    output: Tensor
    uses: list[tuple[nn.Parameter, Use]]
    seen: list[tuple[Tensor, int]]

    def untouched(self) -> bool:
        """Whether nothing at the layer was overwritten in place since."""
        return all(tensor._version == version for tensor, version in self.seen)


@dataclass
class Taps:
    """The taps of one forward pass, in order; or, when not `live`, rules that compute as the layers themselves."""

    live: bool = True
    all: list[Tap] = field(default_factory=list)

    def constant(self, parameter: Tensor | None) -> Any:
        """A parameter's value, cut off from it. Any, since rules hand None on as their layers do."""
        if parameter is None or not self.live or not torch.is_grad_enabled():
            return parameter
        if parameter.grad_fn is not None:
            raise NotByHand  # computed from other parameters, as by weight normalisation
        return parameter.detach()

    def tap(self, output: Tensor, uses: list[tuple[Tensor | None, Use]], *seen: Tensor) -> Tensor:
        """`output`, which is linear in the parameters of `uses`; what their gradients need of `seen` must not change."""
        kept = [(p, use) for p, use in uses if isinstance(p, nn.Parameter) and p.requires_grad]
        if not self.live or not kept or not torch.is_grad_enabled():
            return output
        if not output.requires_grad:
            output.requires_grad_()
        self.all.append(Tap(output, kept, [(t, t._version) for t in (output, *seen)]))
        return output


def _ruled(rule: Rule, taps: Taps, layer: nn.Module, *arguments: Any, **options: Any) -> Any:
    try:
        return rule(taps, layer, *arguments, **options)
    except NotByHand:
        return type(layer).forward(layer, *arguments, **options)


@contextmanager
def installed(taps: Taps, module: nn.Module, rules: Mapping[type, Rule]) -> Iterator[None]:
    """The rules in place of the forward functions of the layers that train and whose exact types they name.

    A rule that does not fit leaves the work to its layer. Activations overwrite nothing meanwhile, and transformers take no
    path of their own for inference.
    """
    changed: list[nn.Module] = []
    in_place: list[nn.Module] = []
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for layer in module.modules():
            rule, own = rules.get(type(layer)), layer.__dict__
            if rule is not None and "forward" not in own and any(p.requires_grad for p in layer.parameters()):
                own["forward"] = partial(_ruled, rule, taps, layer)
                changed.append(layer)
            if own.get("inplace") is True:
                own["inplace"] = False
                in_place.append(layer)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for layer in changed:
            del layer.__dict__["forward"]
        for layer in in_place:
            layer.__dict__["inplace"] = True
