"""Taps: records of the forward pass of a layer, from which the gradients of single examples follow.

If a layer's output is linear in its parameters, an example's gradient follows from the layer's input and from the slope, that is,
the derivative of the loss at that output. Layers with a rule replace their parameters by constants, and record a tap at such an
output. A parameter that enters the loss in another way also gets a gradient from torch, and both are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, maybe_current_level
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fedveil.gradients.gradient_blocks import Block, Dense, lookups, products

if TYPE_CHECKING:
    from torch import Tensor

Rule = Callable[..., Any]
"""(taps, layer, the arguments of its forward) -> the result of its forward; raises NoRule if it does not fit."""


class NoRule(Exception):
    """Raised when no rule fits a call of a layer."""


# --- how a parameter gets its gradient from the slope at a tap -----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Use:
    """The use of a parameter: how its gradient follows from the slope at an output.

    Args:
        made: (slope, n, seen) -> the gradients of n examples, which are concatenated in the first dimension. The functions in
            `BY_PLACES` do not depend on the position of a place within an example.
        seen: values of the forward pass that `made` needs, or a function that returns them after the pass.
    """

    made: Callable[..., Block]
    seen: tuple[Tensor, ...] | Callable[[], tuple[Tensor, ...]] = ()


Made = tuple[int, Callable[..., Block], list["Tensor"]]
"""A use of a parameter after the pass: its number, the function for its gradients, and the arguments, slope first."""


def places(values: Tensor, n: int) -> Tensor:
    """Reshape values [..., k] of n examples to [n, places, k]."""
    return values.reshape(n, math.prod(values.shape[:-1]) // n, values.shape[-1])


def folded(each: Tensor, n: int) -> Tensor:
    """Return the sums [n, k] over the entries of each example; `each` [entries, k] has equally many for all examples."""
    return each if len(each) == n else each.view(n, len(each) // n, -1).sum(1)


def product(inputs: Tensor, slopes: Callable[[Tensor], Tensor] | None = None) -> Use:
    """Return the use for the weight of a linear map of `inputs` [..., i]."""
    if slopes is None:
        return Use(outer, (inputs,))
    return Use(lambda slope, n, seen: outer(slopes(slope), n, seen), (inputs,))


def outer(slope: Tensor, n: int, inputs: Tensor) -> Block:
    """Return the gradient of the weight of a linear map of `inputs` [..., i]."""
    return products(places(slope, n), places(inputs.to(slope.dtype), n))


def shift(slope: Tensor, n: int) -> Block:
    """Return the gradient of a bias along the last dimension."""
    return Dense(places(slope, n).sum(1))


def scale(inputs: Tensor | None = None, slopes: Callable[[Tensor], Tensor] | None = None, size: int = 0) -> Use:
    """Return the use for a factor of `inputs` along the last dimensions, of `size` coordinates; None stands for a bias."""
    if inputs is None and slopes is None and not size:
        return Use(shift)

    def made(slope: Tensor, n: int, *seen: Tensor) -> Block:
        slope = slope if slopes is None else slopes(slope)
        each = slope * seen[0] if seen else slope
        k = size or slope.shape[-1]
        return Dense(each.reshape(n, each.numel() // max(1, n * k), k).sum(1))

    return Use(made, () if inputs is None else (inputs,))


def channel_scale(inputs: Tensor | None = None) -> Use:
    """Return the use for a factor along the channels of [batch, channels, ...]."""

    def made(slope: Tensor, n: int, *seen: Tensor) -> Block:
        each = (slope * seen[0] if seen else slope).reshape(*slope.shape[:2], -1).sum(2)
        return Dense(folded(each, n))

    return Use(made, () if inputs is None else (inputs,))


def lookup(index: Tensor, height: int, padding: int | None = None) -> Use:
    """Return the use for a table of `height` rows, looked up at `index` [...]; the row `padding` gets no gradient."""

    def made(slope: Tensor, n: int, index: Tensor) -> Block:
        index, slopes = places(index[..., None], n)[..., 0], places(slope, n)
        return lookups(index, slopes if padding is None else slopes.masked_fill((index == padding)[..., None], 0.0), height)

    return Use(made, (index,))


# --- the pass ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tap:
    """An output of a layer, and the uses of parameters, by number, whose gradients follow from its slope."""

    layer: str
    output: GradientEdge
    uses: list[tuple[int, Use]]
    dtype: torch.dtype
    versions: list[int]


class Taps:
    """The taps of one forward pass, in order.

    Args:
        parameters: the trained tensors, in order; None for those that torch differentiates, such as one with a hook.
        strict: whether a layer whose rule does not fit raises NoRule; otherwise it computes as in torch.

    Attributes:
        asked: an entry for each request of a slope at a tap; a network that takes gradients itself makes such requests.
    """

    def __init__(self, parameters: Sequence[Tensor | None], *, strict: bool = False) -> None:
        self._numbers = {id(p): i for i, p in enumerate(parameters) if p is not None}
        self._level, self.strict = maybe_current_level(), strict
        self.all: list[_Tap] = []
        self.asked: list[None] = []

    def constant(self, parameter: Tensor | None) -> Any:
        """Return a parameter's detached value. The type is Any, since rules pass None on as their layers do."""
        if parameter is None or not torch.is_grad_enabled() or not parameter.requires_grad:
            return parameter
        if id(parameter) not in self._numbers or maybe_current_level() != self._level:
            raise NoRule  # torch differentiates it, it is computed from others (weight normalisation), or a transformation runs
        return parameter.detach()

    def tap(self, layer: nn.Module, output: Tensor, *uses: tuple[Tensor | None, Use]) -> Tensor:
        """Record a tap at `output`, which is linear in the parameters of `uses`; their inputs must not be overwritten later."""
        kept = [(p, use) for p, use in uses if p is not None and id(p) in self._numbers]
        if not kept or not torch.is_grad_enabled():
            return output
        if not output.requires_grad:
            output.requires_grad_()
            output = output if self.strict else output + 0.0  # a leaf must not be overwritten
        if not self.strict:
            output.register_hook(partial(_ask, self.asked))  # type: ignore[no-untyped-call]
        numbered = [(self._numbers[id(p)], use) for p, use in kept]
        self.all.append(_Tap(type(layer).__name__, get_gradient_edge(output), numbered, kept[0][0].dtype, _versions(numbered)))
        return output

    def uses(self, slopes: Sequence[Tensor | None]) -> list[Made]:
        """Return the uses of all parameters, from the slopes at all taps.

        Raises:
            RuntimeError: an input of a layer was overwritten after the layer had computed with it.
        """
        found: list[Made] = []
        for tap, slope in zip(self.all, slopes, strict=True):
            if _versions(tap.uses) != tap.versions:
                raise RuntimeError(
                    f"the input of a {tap.layer} is modified by an inplace operation after the layer has computed with it"
                )
            if slope is not None:
                slope = slope.to(tap.dtype)
                for number, use in tap.uses:
                    seen = use.seen() if callable(use.seen) else use.seen
                    found.append((number, use.made, [slope, *(t.detach() for t in seen)]))
        return found


def _versions(uses: list[tuple[int, Use]]) -> list[int]:
    """Return the version counters of the recorded tensors, below all transformations."""
    found = []
    for tensor in (t for _, use in uses if not callable(use.seen) for t in use.seen):
        while is_functorch_wrapped_tensor(tensor):
            tensor = get_unwrapped(tensor)
        found.append(tensor._version)
    return found


def _ask(asked: list[None], slope: Tensor) -> None:
    """Record a request of a slope. The hook holds no taps, because taps and graph would then keep each other alive."""
    asked.append(None)


def _ruled(rule: Rule, taps: Taps, layer: nn.Module, *arguments: Any, **options: Any) -> Any:
    try:
        return rule(taps, layer, *arguments, **options)
    except NoRule:
        if taps.strict:
            raise
        return type(layer).forward(layer, *arguments, **options)


@contextmanager
def installed(taps: Taps, module: nn.Module, rules: Mapping[type, Rule]) -> Iterator[None]:
    """Replace the forward functions of trained layers by the rules for their exact types.

    Meanwhile activations do not work in place, and transformers do not use their fast path for inference.
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
