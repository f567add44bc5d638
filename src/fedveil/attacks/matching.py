"""Reading an upload as a gradient to match, and how far a candidate's gradient is from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.attacks.attack_types import CapturedUpload, Clip, Knowledge, ModelFn
from fedveil.attacks.simulate import Simulation, bounded, flat, prepared, simulation, split
from fedveil.errors import ConfigError
from fedveil.training.params import trained_parameters

SURPRISE = 3.5
"""Standard deviations above pure noise at which a tensor counts as carrying signal (one-sided chance 1 in 4,300)."""
_NEAR = 1e-3
"""How much below a bound, relative to it, an upload that was clipped to it may be by rounding."""


@dataclass(frozen=True)
class Target:
    """One upload as the attacker reads it.

    gradient: effective gradient (d,), 0 where nothing was received. weight: trust in each coordinate, in [0, 1] (d,); None =
    1 everywhere. simulate: (x, y) -> effective gradient of a candidate. clip: the bounds on it, in its units, if known.
    """

    module: nn.Module
    gradient: Tensor
    weight: Tensor | None
    simulate: Simulation
    clip: Clip | None = None

    def named(self) -> dict[str, Tensor]:
        """The effective gradient by parameter name."""
        return split(self.gradient, trained_parameters(self.module))

    def clipped(self, name: str) -> bool:
        """Whether a bound may have acted on this parameter: what arrived reaches it (noise can only make it look larger)."""
        if self.clip is None:
            return False
        layer = (self.clip.layers or {}).get(name, math.inf)
        own, whole = float(self.named()[name].norm()), float(self.gradient.norm())
        return own > layer * (1 - _NEAR) or whole > self.clip.whole * (1 - _NEAR)

    def power(self) -> Tensor:
        """Weighted squared norm of the gradient."""
        return (self.gradient.square() if self.weight is None else self.gradient.square() * self.weight).sum()


def read(uploads: Sequence[CapturedUpload], model_fn: ModelFn, state: Mapping[str, Tensor], knowledge: Knowledge) -> list[Target]:
    """The uploads as targets; raises ConfigError for what cannot be read with this knowledge."""
    if not uploads:
        raise ConfigError("an attack needs at least one upload")
    return [_target(upload, model_fn, state, knowledge) for upload in uploads]


def _target(upload: CapturedUpload, model_fn: ModelFn, state: Mapping[str, Tensor], knowledge: Knowledge) -> Target:
    module = prepared(model_fn, state, upload.bn_mode, knowledge.buffers)
    local = knowledge.local
    if upload.kind != "gradient" and local is None:
        raise ConfigError(
            f"an upload of kind {upload.kind!r} needs Knowledge.local (steps, lr); "
            "KnownTraining(steps=1, lr=...) reads it as one gradient"
        )
    scale = effective_scale(upload, knowledge)
    parameters = trained_parameters(module)
    unknown = sorted(set(upload.tensors) - set(parameters))
    if unknown:
        raise ConfigError(f"the upload names {', '.join(unknown)}, which the model does not have; it has {', '.join(parameters)}")
    received = []
    for name, parameter in parameters.items():
        value = upload.tensors.get(name)
        if value is None:
            received.append(torch.zeros_like(parameter))
            continue
        if value.shape != parameter.shape:
            raise ConfigError(f"upload: {name} has shape {tuple(value.shape)}, the model's is {tuple(parameter.shape)}")
        start = parameter.detach() if upload.kind == "weights" else torch.zeros(())
        received.append((value.to(parameter.dtype) - start) * scale)
    target = flat(received).detach()
    weight = trust(target, parameters, set(upload.tensors), knowledge, abs(scale))
    simulate = simulation(module, local if upload.kind != "gradient" else None)
    clip = None if knowledge.clip is None else knowledge.clip.scaled(abs(scale))
    if clip is not None:
        simulate = _through_the_door(simulate, parameters, clip, knowledge.mask or {})
    return Target(module, target, weight, simulate, clip)


def _through_the_door(
    simulate: Simulation, parameters: Mapping[str, Tensor], clip: Clip, mask: Mapping[str, Tensor]
) -> Simulation:
    """A candidate's gradient as the door would let it out: restricted, clipped per parameter, then as a whole."""

    def clipped(x: Tensor, y: Tensor) -> Tensor:
        parts = split(simulate(x, y), parameters)
        parts = {k: v * mask[k] if k in mask else v for k, v in parts.items()}
        if clip.layers is not None:
            parts = {k: bounded([v], clip.layers[k])[0] if k in clip.layers else v for k, v in parts.items()}
        whole = list(parts.values())
        return flat(bounded(whole, clip.whole) if clip.whole < float("inf") else whole)

    return clipped


def effective_scale(upload: CapturedUpload, knowledge: Knowledge) -> float:
    """Factor from what was sent to the effective gradient: 1 for a gradient, -1 / (lr K) for a change of weights."""
    if upload.kind == "gradient" or knowledge.local is None:
        return 1.0
    return -1.0 / (knowledge.local.lr * knowledge.local.steps)


def trust(
    received: Tensor, parameters: Mapping[str, Tensor], sent: set[str], knowledge: Knowledge, scale: float = 1.0
) -> Tensor | None:
    """Weight of each coordinate in [0, 1]: p / (noise variance + p), and 0 where it was withheld or noise swamps it.

    p is the mean square of the tensor's signal, estimated from the entries of least noise as what exceeds it. A tensor is
    swamped when noise alone would give this estimate in at least one of some 4,000 cases; if all are, weights are 1 / noise
    variance. (A threshold at two standard errors let noise in through small tensors, where it outweighs everything.)
    received: effective gradient (d,). scale: factor from the units of `knowledge.noise_std` to those of `received`.
    A floor common to all tensors instead of p makes an attacker worse than a naive one when most of the signal is noisy.
    """
    if sent >= set(parameters) and knowledge.noise_std is None and knowledge.mask is None:
        return None
    seen, variance = [], []
    for name, parameter in parameters.items():
        mask = None if knowledge.mask is None else knowledge.mask.get(name)
        here = torch.full(parameter.shape, float(name in sent))
        seen.append(here if mask is None else here * _shaped(mask, parameter, name, "mask").bool())
        variance.append((_shaped((knowledge.noise_std or {}).get(name, 0.0), parameter, name, "noise_std") * scale).square())
    if not any(bool(s.any()) for s in seen):
        raise ConfigError("nothing was sent, or the mask hides everything: there is no gradient to match")
    parts = split(received, parameters).values()
    power = [_signal_power(part, v, s) for part, v, s in zip(parts, variance, seen, strict=True)]
    if not any(power):
        least = min(float(v[s > 0].min()) for v, s in zip(variance, seen, strict=True) if bool(s.any()))
        power = [least] * len(power)
    weight = flat([s * p / (v + p + 1e-30) for s, p, v in zip(seen, power, variance, strict=True)])
    return weight / weight.max() if bool(weight.any()) else flat(seen)


def withheld_guess(upload: CapturedUpload, fraction: float) -> dict[str, Tensor]:
    """A mask for an attacker who does not know it: drop the largest `fraction` of the received entries by magnitude.

    Made for defences that put noise on the largest entries only.
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"fraction must lie in [0, 1), got {fraction}")
    magnitudes = flat([t.abs() for t in upload.tensors.values()])
    keep = magnitudes.numel() - round(fraction * magnitudes.numel())
    threshold = magnitudes.kthvalue(max(keep, 1)).values
    return {name: value.abs() <= threshold for name, value in upload.tensors.items()}


def squared(target: Target, candidate: Tensor) -> Tensor:
    """Weighted sum of squared differences."""
    difference = candidate - target.gradient
    return (difference.square() if target.weight is None else difference.square() * target.weight).sum()


def cosine(target: Target, candidate: Tensor) -> Tensor:
    """1 - cosine similarity in the weighted inner product; excluded coordinates count neither above nor below the line."""
    weighted = target.gradient if target.weight is None else target.gradient * target.weight
    own = candidate if target.weight is None else candidate * target.weight
    scale = (weighted @ target.gradient).sqrt() * (own @ candidate + 1e-30).sqrt()
    return 1 - (weighted @ candidate) / (scale + 1e-12)


def averaged(measure: Callable[[Target, Tensor], Tensor], targets: Sequence[Target], x: Tensor, y: Tensor) -> Tensor:
    """A distance of the candidate (x, y), averaged over the uploads."""
    return torch.stack([measure(t, t.simulate(x, y)) for t in targets]).mean()


def mean_power(targets: Sequence[Target]) -> Tensor:
    """Weighted squared norm of what was received, averaged over the uploads."""
    return torch.stack([t.power() for t in targets]).mean()


def _shaped(value: float | Tensor, parameter: Tensor, name: str, what: str) -> Tensor:
    try:
        return torch.as_tensor(value, dtype=torch.float32).expand(parameter.shape)
    except RuntimeError:
        raise ConfigError(f"Knowledge.{what}: {name} does not fit the parameter's shape {tuple(parameter.shape)}") from None


def _signal_power(received: Tensor, variance: Tensor, seen: Tensor) -> float:
    """Mean square of the signal in the entries received with the least noise; 0 when noise alone would explain it.

    The cube root of a chi-square over its degrees of freedom n is nearly normal, N(1 - 2/(9n), 2/(9n)) (Wilson and Hilferty
    1931); unlike the standard error it holds for the ten entries of a bias too.
    """
    least = float(variance[seen > 0].min()) if bool(seen.any()) else 0.0
    quiet = seen * (variance <= least * (1 + 1e-6))
    count = float(quiet.sum())
    if count == 0:
        return 0.0
    power = float((received.square() * quiet).sum()) / count
    if least == 0:
        return power
    spread = 2 / (9 * count)
    surprise = ((power / least) ** (1 / 3) - (1 - spread)) / spread**0.5
    return power - least if surprise > SURPRISE else 0.0
