"""Taps: what the forward pass of a layer leaves behind for the gradients of single examples.

Where a layer's output is linear in its parameters, an example's gradient follows from the slope of its loss at that output and
from the layer's input. Layers with a rule compute with constants in place of their parameters and leave a tap at such an output.
A parameter that enters the loss in any other way gets a gradient of its own, which is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fedveil.release.gradient_blocks import Block, Dense, lookups, products

if TYPE_CHECKING:
    from torch import Tensor

Rule = Callable[..., Any]
"""(taps, layer, the arguments of its forward) -> what its forward returns; raises NoRule where it does not fit."""


class NoRule(Exception):
    """No rule fits what a layer does."""


# --- how a parameter gets its gradient from the slope at a tap -----------------------------------------------------------

Use = Callable[["Tensor", int], Block]
"""(slope, n) -> the gradients of n examples, which lie one after the other in the first dimension of the slope."""


def places(values: Tensor, n: int) -> Tensor:
    """The values [..., k] of n examples as [n, places, k]."""
    return values.reshape(n, -1, values.shape[-1])


def product(inputs: Tensor | Callable[[], Tensor], slopes: Callable[[Tensor], Tensor] = lambda slope: slope) -> Use:
    """For the weight of a linear map of `inputs` [..., i], which a rule may know only after the pass."""

    def use(slope: Tensor, n: int) -> Block:
        seen = inputs() if callable(inputs) else inputs
        slope = slopes(slope)
        return products(places(slope, n), places(seen.detach().to(slope.dtype), n))

    return use


def scale(inputs: Tensor | None = None, slopes: Callable[[Tensor], Tensor] = lambda slope: slope, size: int = 0) -> Use:
    """For what multiplies `inputs` along the last dimension, or along the last few, of `size` coordinates; None for a bias."""

    def use(slope: Tensor, n: int) -> Block:
        slope = slopes(slope)
        each = slope if inputs is None else slope * inputs
        return Dense(each.reshape(n, -1, size or slope.shape[-1]).sum(1))

    return use


def channel_scale(inputs: Tensor | None = None) -> Use:
    """The same along the channels of [batch, channels, ...]."""

    def use(slope: Tensor, n: int) -> Block:
        each = (slope if inputs is None else slope * inputs).reshape(*slope.shape[:2], -1).sum(2)
        return Dense(folded(each, n))

    return use


def folded(each: Tensor, n: int) -> Tensor:
    """The sums [n, k] over the entries of each example, of which `each` [entries, k] has the same number for all."""
    return each if len(each) == n else each.view(n, len(each) // n, -1).sum(1)


def lookup(index: Tensor, height: int, padding: int | None = None) -> Use:
    """For a table of `height` rows of which `index` [...] were looked up; the row `padding` gets no gradient."""

    def use(slope: Tensor, n: int) -> Block:
        slopes = slope if padding is None else slope.masked_fill((index == padding)[..., None], 0.0)
        return lookups(places(index[..., None], n)[..., 0], places(slopes, n), height)

    return use


# --- the pass ----------------------------------------------------------------------------------------------------------


@dataclass
class Tap:
    """An output as the layer made it, and how each parameter behind it, by number, gets its gradient from the slope there."""

    layer: str
    output: GradientEdge
    uses: list[tuple[int, Use]]
    seen: list[tuple[Tensor, int]]


@dataclass
class Taps:
    """The taps of one forward pass, in order.

    Args:
        parameters: the tensors that train, in order. version: how often a tensor was overwritten.
        leaf: makes an output, behind which nothing trains, one that has a slope.
        left: which parameters are left to torch, such as those with hooks.
        strict: a layer whose rule does not fit raises NoRule; else it computes as torch does.
    """

    parameters: Sequence[Tensor]
    leaf: Callable[[Tensor], Tensor]
    version: Callable[[Tensor], int] = lambda tensor: tensor._version
    left: Sequence[bool] = ()
    strict: bool = False
    all: list[Tap] = field(default_factory=list)

    def __post_init__(self) -> None:
        left = self.left or [False] * len(self.parameters)
        self._numbers = {id(p): i for i, (p, out) in enumerate(zip(self.parameters, left, strict=True)) if not out}

    def constant(self, parameter: Tensor | None) -> Any:
        """A parameter's value, cut off from it. Any, since rules hand None on as their layers do."""
        if parameter is None or not torch.is_grad_enabled() or not parameter.requires_grad:
            return parameter
        if id(parameter) not in self._numbers:
            raise NoRule  # left to torch, or computed from other parameters, as by weight normalisation
        return parameter.detach()

    def tap(self, layer: nn.Module, output: Tensor, uses: list[tuple[Tensor | None, Use]], *seen: Tensor) -> Tensor:
        """`output`, which is linear in the parameters of `uses`; what their gradients need of `seen` must not change."""
        kept = [(self._numbers[id(p)], use) for p, use in uses if id(p) in self._numbers]
        if not kept or not torch.is_grad_enabled():
            return output
        if not output.requires_grad:
            output = self.leaf(output)
        versions = [(t, self.version(t)) for t in seen]
        self.all.append(Tap(type(layer).__name__, get_gradient_edge(output), kept, versions))
        return output

    def gradients(self, slopes: Sequence[Tensor | None], n: int) -> dict[int, list[Block]]:
        """The gradients of n examples from the slopes at all taps: of each parameter, by number, what its uses contribute.

        Raises:
            RuntimeError: an input of a layer was overwritten after the layer had computed with it.
        """
        parts: dict[int, list[Block]] = {}
        for tap, slope in zip(self.all, slopes, strict=True):
            if any(self.version(tensor) != before for tensor, before in tap.seen):
                raise RuntimeError(
                    f"the input of a {tap.layer} is modified by an inplace operation after the layer has computed with it"
                )
            blocks: dict[Use, Block] = {}
            for number, use in tap.uses if slope is not None else ():
                if use not in blocks:
                    blocks[use] = use(slope.to(self.parameters[number].dtype), n)
                parts.setdefault(number, []).append(blocks[use])
        return parts


def _ruled(rule: Rule, taps: Taps, layer: nn.Module, *arguments: Any, **options: Any) -> Any:
    try:
        return rule(taps, layer, *arguments, **options)
    except NoRule:
        if taps.strict:
            raise
        return type(layer).forward(layer, *arguments, **options)


@contextmanager
def installed(taps: Taps, module: nn.Module, rules: Mapping[type, Rule]) -> Iterator[None]:
    """The rules in place of the forward functions of the layers that train and whose exact types they name.

    Activations overwrite nothing meanwhile, and transformers take no path of their own for inference.
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
