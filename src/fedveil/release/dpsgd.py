"""DP-SGD inside a client: record-level privacy for the results of local training (Abadi et al. 2016).

Each step takes a Poisson batch, clips each example's gradient, adds the gradients in float64, puts the sum on the grid and adds
rounded Gaussian noise; training only sees the noisy integers. They are divided by a public batch size. The contribution of errors
of norms, sums and rounding to the sensitivity is charged (`fedveil.mechanism.cost.step_sensitivity`).

The objective never has the examples: it gets an empty batch and asks this source for its noisy gradient, once per step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from fedveil.errors import ConfigError
from fedveil.gradients.gradient_blocks import Block, clipped_sum
from fedveil.gradients.per_example import per_example_gradients
from fedveil.mechanism.cost import step_exponent
from fedveil.mechanism.grid import exponent_for
from fedveil.tasks.classification import Classification

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fedveil.mechanism.plan import DpSgd, Extra
    from fedveil.release.noise import Randomness
    from fedveil.tasks.task import Task
    from fedveil.training.local import Local, LocalSpec
    from fedveil.training.params import FlatModel, Layout

_log = logging.getLogger(__name__)

Pass = Callable[[], dict[str, Any]]
"""Function that makes one pass over examples and returns plain values."""


def made_here(act: Pass, *number: int) -> dict[str, Any]:
    """Make a pass in this process."""
    return act()


@dataclass
class PerExampleGradient:
    """Gradient source of DP-SGD (see `fedveil.training.local.GradientSource`); one for each client and round.

    Args:
        plan: of each step. randomness: of batches and noise. key: (round, client).
        gradients: (module, x, y) -> the gradient of each example in blocks, and the loss [n] of each.
        task: whose weights of examples are applied outside of the clip.
        rehearsal: the examples are public and nothing is released, so an example on which the network fails raises.
        made: makes a pass, numbered by its step and its first example, for instance in a child process.
        singly: whether each example has a separate pass.
    """

    plan: DpSgd
    randomness: Randomness
    key: tuple[int, int]
    gradients: Callable[[torch.nn.Module, Tensor, Tensor], tuple[list[Block], Tensor]] = field(
        default_factory=lambda: partial(per_example_gradients, losses_of=Classification().losses)
    )
    task: Task = field(default_factory=Classification)
    rehearsal: bool = False
    made: Callable[..., dict[str, Any]] = made_here
    singly: bool = False
    joined: int = field(default=0, init=False)
    _batch: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    losses: list[float] = field(default_factory=list, init=False)
    _of_batch: list[float] = field(default_factory=list, init=False)

    @property
    def steps(self) -> int:
        """Return the steps of the round, for any number of examples."""
        return self.plan.steps

    @property
    def examples(self) -> int:
        """Return the nominal number of examples, from the rate: a client's own number is as private as its records."""
        return round(self.plan.expected / self.plan.rate)

    @property
    def waiting(self) -> int:
        """Return the number of examples in the batch whose gradient has not been requested yet."""
        return 0 if self._batch is None else len(self._batch[1])

    def batches(self, local: Local, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield an empty batch per step, while the examples of its Poisson sample stay here.

        Examples beyond the cap never join. The examples are used when the gradient is requested.

        Raises:
            ConfigError: the objective did not request exactly one gradient per step.
        """
        local.steps = self.steps
        for step in range(self.plan.steps):
            chosen = self.randomness.coins(self.plan.rate, min(len(y), self.plan.cap), "examples", *self.key, step)
            self._batch = x[torch.from_numpy(chosen)], y[torch.from_numpy(chosen)]
            yield x.new_empty(0, *x.shape[1:]), y.new_empty(0, *y.shape[1:])  # not views, which contain all examples
            if self._batch is not None:
                raise ConfigError(
                    f"under DP-SGD an objective must ask for local.gradient once in each step; it did not in step {step}"
                )

    def __call__(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Write (gridded sum of clipped gradients + noise) / expected batch size into the gradient.

        Returns:
            NaN: the loss of the batch is private, and only `losses` has it, for the client's own diagnostics.
        """
        if self._batch is None:
            raise ConfigError("under DP-SGD an objective may ask for local.gradient only once in each step: each costs a release")
        (x, y), self._batch = self._batch, None
        model, std = local.model, self.plan.noise_multiplier * self.plan.clip
        model.grad.zero_()
        total = torch.zeros(len(model.grad), dtype=torch.float64)
        if len(y):
            total = self._sum(model, x, y, local.step).cpu()
            if self._of_batch:  # otherwise all of its examples raised errors
                self.losses.append(sum(self._of_batch) / len(self._of_batch))
                self._of_batch.clear()
        if std:
            step = 2.0 ** step_exponent(self.plan)
            noise = self.randomness.integers(std / step, len(total), "step", *self.key, local.step)
            integers = torch.from_numpy(noise) + total.mul_(1 / step).round_().to(torch.int64)
            total = integers.to(torch.float64).mul_(step)
        model.grad.copy_(total.div_(self.plan.expected))
        return model.vector.new_full((), torch.nan)

    def count(self, cells: Tensor, extra: Extra, step: int) -> NDArray[np.int64]:
        """Return the noisy sum [m] of the cells [n, m] of test records that join one step, on the grid of `counts_exponent`.

        A record's cells have norm at most `extra.clip`, and it joins as a training record joins a batch. `joined` is the number
        that did, which is private.
        """
        grid_step = 2.0 ** counts_exponent(extra)
        chosen = self.randomness.coins(self.plan.rate, len(cells), "tests", *self.key, step)
        self.joined = len(chosen)
        integers = np.floor(cells.double().numpy() / grid_step).astype(np.int64)
        noise = self.randomness.integers(extra.noise_std / grid_step, cells.shape[1], "counts", *self.key, step)
        total: NDArray[np.int64] = noise + integers[chosen].sum(0)
        return total

    def _sum(self, model: FlatModel, x: Tensor, y: Tensor, step: int) -> Tensor:
        """Return the sum [d] of clipped gradients, computed for `together` examples at a time.

        Numerical libraries add in a different order for a different number of examples. So one more example would change the
        gradients of the others by rounding, which chosen weights could amplify beyond the clip.
        """
        size = 1 if self.singly else self.plan.together
        parts = zip(torch.split(x, size), torch.split(y, size), strict=True)
        return reduce(torch.add, (self._part(model, *part, step, size * place) for place, part in enumerate(parts)))

    def _part(self, model: FlatModel, x: Tensor, y: Tensor, step: int, first: int) -> Tensor:
        """Return the sum for one part of the batch; an example that raises an error counts as zero, as the client's log says.

        Network writes into trained parameters, such as an embedding with max_norm, are undone, because a client's update would
        reveal them. If other examples of the part were affected, all gradients are computed again, one at a time.
        """
        before = model.vector.clone()
        try:
            result = self.made(partial(self._pass, model, x, y, step, first), step, first)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            model.vector.copy_(before)
            if len(y) > 1:
                return self._one_at_a_time(model, x, y, step, first)
            if self.rehearsal:
                raise
            _log.warning("client %d, round %d: an example counts as zero: %r", self.key[1], self.key[0], error)
            return torch.zeros(len(before), dtype=torch.float64, device=x.device)
        model.vector.copy_(before)
        if result["wrote"] and len(y) > 1:
            return self._one_at_a_time(model, x, y, step, first)
        self._of_batch += result["losses"].tolist()
        total: Tensor = result["sum"]
        return total

    def _pass(self, model: FlatModel, x: Tensor, y: Tensor, step: int, first: int) -> dict[str, Any]:
        """Return the sum [d], the losses [n], and whether the pass wrote into trained parameters."""
        before = model.vector.clone()
        filled = [_filled(part, 1 if self.singly else self.plan.together) for part in (x, y)]
        number = (step, first) if first else (step,)
        with self.randomness.layers(model.vector.device, *self.key, *number, elsewhere=self.made is not made_here):
            blocks, losses = self.gradients(model.module, *filled)
            clip, most = self._weighed(filled[1])
        wrote = not torch.equal(model.vector.view(torch.int32), before.view(torch.int32))
        return {"sum": clipped_sum(blocks, clip, len(y), most), "losses": losses[: len(y)], "wrote": wrote}

    def _weighed(self, y: Tensor) -> tuple[float | Tensor, float]:
        """Return the clip of each example, and the factor applied to its gradient before.

        If a gradient were clipped together with its weight w, the weight would be lost above the clip. Instead it is clipped
        without the weight, then multiplied by w / w_max, its share of the largest weight: its norm is at most C w / w_max <= C.
        As a formula, min(1, C / |g|) w / w_max g is the gradient w g of the weighted loss times 1 / w_max, clipped to C w /
        w_max. The share depends on the example alone.
        """
        weights = self.task.example_weights(y)
        if weights is None:
            return self.plan.clip, 1.0
        shares = (weights.double() / self.task.largest_weight).nan_to_num(0.0).clamp(0.0, 1.0)
        return self.plan.clip * shares.expand(len(y)), 1 / self.task.largest_weight

    def _one_at_a_time(self, model: FlatModel, x: Tensor, y: Tensor, step: int, first: int) -> Tensor:
        return torch.stack([self._part(model, x[i : i + 1], y[i : i + 1], step, first + i) for i in range(len(y))]).sum(0)


class Counting(Protocol):
    """Gradient source that also releases counts of test records, in each step of a round."""

    @property
    def steps(self) -> int:
        """Return the steps of the round."""
        ...

    def count(self, cells: Tensor, extra: Extra, step: int) -> NDArray[np.int64]:
        """Return the noisy integers [m] of a step; see `PerExampleGradient.count`."""
        ...


def counts_of_steps(source: Counting, cells: Tensor, extra: Extra) -> Tensor:
    """Return the sum [m] of the noisy counts of all steps of a round, in float32: post-processing of their releases."""
    total = sum((source.count(cells, extra, step) for step in range(source.steps)), np.zeros(cells.shape[1], np.int64))
    return torch.from_numpy(total).to(torch.float64).mul_(2.0 ** counts_exponent(extra)).to(torch.float32)


def counts_exponent(extra: Extra) -> int:
    """Return the exponent of the grid of counts: that of their noise, but in [-30, 0]: whole numbers lie on it, and fit."""
    return min(max(exponent_for(extra.noise_std), -30), 0)


def _filled(part: Tensor, length: int) -> Tensor:
    """Pad a batch to a length with copies of its first example."""
    return torch.cat([part, part[:1].expand(length - len(part), *part.shape[1:])]) if len(part) < length else part


def step_noise(plan: DpSgd, spec: LocalSpec, layout: Layout, round: int) -> Tensor:
    """Return the expected squared norm per layer [L] of a round's step noise in the update; NaN if unknown."""
    gain = _gain(spec, round, plan.steps)
    return torch.tensor(layout.sizes, dtype=torch.float32) * gain * (plan.noise_multiplier * plan.clip / plan.expected) ** 2


@lru_cache(maxsize=64)
def _gain(spec: LocalSpec, round: int, steps: int) -> float:
    """Return the total gain of a round's steps, which is the same for all of its clients."""
    return sum(spec.gain(round, step, steps) for step in range(steps))
