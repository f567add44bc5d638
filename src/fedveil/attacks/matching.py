"""The simulation of a client by the attacker, and the distance of a candidate's gradient from an upload."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedveil.attacks.attack_types import Bounds, CapturedUpload, Clip, Knowledge, KnownTraining, ModelFn
from fedveil.errors import ConfigError
from fedveil.training.params import called_with, copied, trained_parameters

Simulation = Callable[[Tensor, Tensor], Tensor]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def prepared(model_fn: ModelFn, state: Mapping[str, Tensor], bn_mode: str, buffers: Mapping[str, Tensor] | None) -> nn.Module:
    """Return the model at `state`, made deterministic: dropout off, batch normalisation as `bn_mode` says.

    "train" strips the running statistics, so that batches normalise themselves and nothing is updated on the way.
    state: trained parameters by name, and buffers if the server distributes them; `buffers` override those.
    """
    module = copied(model_fn())
    given, own = dict(state) | dict(buffers or {}), module.state_dict(keep_vars=True)
    missing = [name for name in trained_parameters(module) if name not in state]
    if wrong := missing or sorted(given.keys() - own.keys()):
        raise ConfigError(f"the state does not fit the model: {', '.join(wrong)} missing or unknown")
    values = {id(own[name]): value for name, value in given.items()}  # one tensor may have several names
    module.load_state_dict({name: values.get(id(tensor), tensor) for name, tensor in own.items()})
    module.eval()
    if bn_mode == "train":
        for layer in module.modules():
            if isinstance(layer, BATCH_NORMS):
                layer.track_running_stats = False
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return module


def split(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split a flat vector (d,) into tensors with the names and shapes of `like`."""
    parts = torch.split(vector, [t.numel() for t in like.values()])
    return {name: part.view(t.shape) for (name, t), part in zip(like.items(), parts, strict=True)}


def flat(tensors: Iterator[Tensor] | tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """Concatenate tensors into one vector."""
    return torch.cat([t.reshape(-1) for t in tensors])


def gradient(module: nn.Module, x: Tensor, y: Tensor, create_graph: bool = False) -> Tensor:
    """Return the gradient of the mean cross-entropy with respect to the trained parameters, flat (d,).

    x: (n, *shape). y: classes int64 (n,), or class probabilities (n, classes).
    """
    with sdpa_kernel(SDPBackend.MATH):  # the fast attention kernels have no second derivative
        loss = F.cross_entropy(module(x), y)
    return flat(torch.autograd.grad(loss, tuple(trained_parameters(module).values()), create_graph=create_graph))


def bounded(tensors: Sequence[Tensor], bound: float) -> list[Tensor]:
    """Scale the tensors by one factor to a joint L2 norm of at most `bound`, differentiably."""
    norm = (torch.stack([t.square().sum() for t in tensors]).sum() + 1e-30).sqrt()
    return [t * (bound / norm).clamp_max(1.0) for t in tensors]


def batches(local: KnownTraining, n: int) -> list[Tensor]:
    """Return the example indices of each local step: `local.order` if known, else consecutive batches, epoch after epoch."""
    if local.order is not None:
        return [torch.tensor(indices) for indices in local.order]
    size = min(local.batch or n, n)
    chunks = [torch.arange(first, min(first + size, n)) for first in range(0, n, size)]
    return [chunks[k % len(chunks)] for k in range(local.steps)]


def simulation(module: nn.Module, local: KnownTraining | None) -> Simulation:
    """Return the function (x, y) -> effective gradient (w_0 - w_K) / (lr K), flat (d,), differentiable in x and y.

    For plain SGD of one step this is the gradient itself; else K steps are unrolled.
    """
    if local is None or local.plain:
        return lambda x, y: gradient(module, x, y, create_graph=True)
    spec = local
    start = trained_parameters(module)

    def simulate(x: Tensor, y: Tensor) -> Tensor:
        end = unrolled(module, start, x, y, spec)
        return flat([(start[k] - end[k]) / (spec.lr * spec.steps) for k in start])

    return simulate


def unrolled(module: nn.Module, start: Mapping[str, Tensor], x: Tensor, y: Tensor, local: KnownTraining) -> dict[str, Tensor]:
    """Return the parameters after `local.steps` steps, differentiable in x and y.

    Adam puts eps inside the root: the derivative of sqrt at 0 is infinite. SGD is torch's: first momentum, no dampening.
    """
    rates = local.rates or (local.lr,) * local.steps
    params = dict(start)
    first = {name: torch.zeros_like(value) for name, value in params.items()}
    second = dict(first)
    for k, chosen in enumerate(batches(local, len(x)), 1):
        with sdpa_kernel(SDPBackend.MATH):
            loss = F.cross_entropy(called_with(module, params, x[chosen]), y[chosen])
        made = torch.autograd.grad(loss, tuple(params.values()), create_graph=True)
        grads = dict(zip(params, made if local.batch_clip is None else bounded(made, local.batch_clip), strict=True))
        if local.optimizer == "sgd":
            first = {name: local.momentum * first[name] + g + local.weight_decay * params[name] for name, g in grads.items()}
            params = {name: value - rates[k - 1] * first[name] for name, value in params.items()}
            continue
        first = {name: 0.9 * first[name] + 0.1 * g for name, g in grads.items()}
        second = {name: 0.999 * second[name] + 0.001 * g * g for name, g in grads.items()}
        params = {
            name: value - rates[k - 1] * (first[name] / (1 - 0.9**k)) / torch.sqrt(second[name] / (1 - 0.999**k) + 1e-16)
            for name, value in params.items()
        }
    return params


_SURPRISE = 3.5
"""Number of standard deviations above pure noise from which a tensor counts as signal (one-sided probability 1 / 4,300)."""
_NEAR = 1e-3
"""Relative rounding error: an upload at most this far below a bound counts as clipped."""


@dataclass(frozen=True)
class Target:
    """One upload as a target of the matching.

    gradient: effective gradient (d,), 0 where nothing was received. weight: trust in each coordinate, in [0, 1] (d,); None =
    1 everywhere. simulate: (x, y) -> effective gradient of a candidate. clip: the bounds on it, in its units, if known.
    """

    module: nn.Module
    gradient: Tensor
    weight: Tensor | None
    simulate: Simulation
    clip: Clip | None = None

    def named(self) -> dict[str, Tensor]:
        """Return the effective gradient by parameter name."""
        return split(self.gradient, trained_parameters(self.module))

    def clipped(self, name: str) -> bool:
        """Return whether this parameter may have been clipped.

        It may have been if its received norm reaches its layer's bound, or the norm of the whole gradient reaches the bound on
        the whole. Noise enlarges norms on average, so a gradient that was not clipped may be reported too.
        """
        if self.clip is None:
            return False
        layer = (self.clip.layers or {}).get(name, math.inf)
        own, whole = float(self.named()[name].norm()), float(self.gradient.norm())
        return own > layer * (1 - _NEAR) or whole > self.clip.whole * (1 - _NEAR)

    def power(self) -> Tensor:
        """Return the weighted squared norm of the gradient."""
        return (self.gradient.square() if self.weight is None else self.gradient.square() * self.weight).sum()


def read(uploads: Sequence[CapturedUpload], model_fn: ModelFn, state: Mapping[str, Tensor], knowledge: Knowledge) -> list[Target]:
    """Convert uploads to targets. Raises ConfigError for an upload that this knowledge does not suffice to read."""
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
    scale = _effective_scale(upload, knowledge)
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
    """Apply the door to a candidate's gradient: restrict it, clip each parameter, then clip the whole."""

    def clipped(x: Tensor, y: Tensor) -> Tensor:
        parts = split(simulate(x, y), parameters)
        parts = {k: v * mask[k] if k in mask else v for k, v in parts.items()}
        if clip.layers is not None:
            parts = {k: bounded([v], clip.layers[k])[0] if k in clip.layers else v for k, v in parts.items()}
        whole = list(parts.values())
        return flat(bounded(whole, clip.whole) if clip.whole < float("inf") else whole)

    return clipped


def _effective_scale(upload: CapturedUpload, knowledge: Knowledge) -> float:
    """Return the factor from the upload to the effective gradient: 1 for a gradient, -1 / (lr K) for a change of weights."""
    if upload.kind == "gradient" or knowledge.local is None:
        return 1.0
    return -1.0 / (knowledge.local.lr * knowledge.local.steps)


def trust(
    received: Tensor, parameters: Mapping[str, Tensor], sent: set[str], knowledge: Knowledge, scale: float = 1.0
) -> Tensor | None:
    """Return the weight of each coordinate in [0, 1]: p / (noise variance + p), or 0 if it was withheld or is mostly noise.

    p is the mean square of the tensor's signal, estimated from the entries with the least noise as the excess over it. A tensor
    counts as noise if noise alone would give this estimate in at least one of some 4,000 cases; if all are, weights are 1 / noise
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
    """Guess the mask for an attacker who does not know it: drop the largest `fraction` of the received entries by magnitude.

    This fits defences that add noise to the largest entries only.
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"fraction must lie in [0, 1), got {fraction}")
    magnitudes = flat([t.abs() for t in upload.tensors.values()])
    keep = magnitudes.numel() - round(fraction * magnitudes.numel())
    threshold = magnitudes.kthvalue(max(keep, 1)).values
    return {name: value.abs() <= threshold for name, value in upload.tensors.items()}


def squared(target: Target, candidate: Tensor) -> Tensor:
    """Return the weighted sum of squared differences."""
    difference = candidate - target.gradient
    return (difference.square() if target.weight is None else difference.square() * target.weight).sum()


def cosine(target: Target, candidate: Tensor) -> Tensor:
    """Return 1 - cosine similarity under the weighted inner product; excluded coordinates have weight 0 in all norms."""
    weighted = target.gradient if target.weight is None else target.gradient * target.weight
    own = candidate if target.weight is None else candidate * target.weight
    scale = (weighted @ target.gradient).sqrt() * (own @ candidate + 1e-30).sqrt()
    return 1 - (weighted @ candidate) / (scale + 1e-12)


def averaged(measure: Callable[[Target, Tensor], Tensor], targets: Sequence[Target], x: Tensor, y: Tensor) -> Tensor:
    """Return a distance of the candidate (x, y), averaged over the uploads."""
    return torch.stack([measure(t, t.simulate(x, y)) for t in targets]).mean()


def mean_power(targets: Sequence[Target]) -> Tensor:
    """Return the weighted squared norm of the received gradients, averaged over the uploads."""
    return torch.stack([t.power() for t in targets]).mean()


def _shaped(value: float | Tensor, parameter: Tensor, name: str, what: str) -> Tensor:
    try:
        return torch.as_tensor(value, dtype=torch.float32).expand(parameter.shape)
    except RuntimeError:
        raise ConfigError(f"Knowledge.{what}: {name} does not fit the parameter's shape {tuple(parameter.shape)}") from None


def _signal_power(received: Tensor, variance: Tensor, seen: Tensor) -> float:
    """Return the mean square of the signal in the entries with the least noise; 0 if noise alone would explain it.

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
    return power - least if surprise > _SURPRISE else 0.0


# --- optimisers ----------------------------------------------------------------------------------------------------------------


Report = Callable[[int, float], None]
LineSearch = Literal["strong_wolfe"] | None


def lbfgs(
    loss: Callable[[], Tensor],
    variables: Sequence[Tensor],
    steps: int,
    tolerance: float,
    line_search: LineSearch,
    report: Report,
    stall: int = 5,
) -> tuple[list[Tensor], float, int, int, str]:
    """Run L-BFGS with rate 1, history 100 and 20 inner iterations per step, from the present values of `variables`.

    It ends below `tolerance`, at a non-finite loss, or after `stall` steps without change. Returns the best values,
    the loss at exactly these values, steps, closures and the reason for stopping.
    """
    optimizer = torch.optim.LBFGS(list(variables), lr=1.0, max_iter=20, history_size=100, line_search_fn=line_search)
    closures = 0

    def closure() -> Tensor:
        nonlocal closures
        closures += 1
        value = loss()
        for variable, grad in zip(variables, torch.autograd.grad(value, list(variables)), strict=True):
            variable.grad = grad
        return value.detach()

    best, best_loss, unchanged, reason, done = [v.detach().clone() for v in variables], math.inf, 0, "steps exhausted", steps
    for step in range(1, steps + 1):
        before = [v.detach().clone() for v in variables]
        value = float(optimizer.step(closure))  # type: ignore[no-untyped-call]
        if value < best_loss:
            best, best_loss = before, value
        report(step, value)
        same = all(torch.equal(b, v.detach()) for b, v in zip(before, variables, strict=True))
        unchanged = unchanged + 1 if same else 0
        ended = {"not finite": not math.isfinite(value), "below tolerance": value < tolerance, "stalled": unchanged >= stall}
        if any(ended.values()):
            reason, done = next(why for why, holds in ended.items() if holds), step
            break
    last = float(closure())
    if last < best_loss:
        best, best_loss = [v.detach().clone() for v in variables], last
    return best, best_loss, done, closures, reason


def adam(
    loss: Callable[[], Tensor],
    x: Tensor,
    rates: Sequence[float],
    bounds: Bounds,
    report: Report,
    signed: bool,
    langevin: Callable[[int], Tensor] | None = None,
) -> tuple[int, str]:
    """Run Adam on x in place, clamped to the bounds after each step. Returns the number of steps and the reason for stopping.

    rates: the learning rate of each step. signed: use the sign of the gradient. langevin: step -> noise added to x, in units of
    the rate.
    """
    optimizer = torch.optim.Adam([x], lr=rates[0])
    low, high = bounds.edges()
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        value = loss()
        reached = float(value.detach())
        if not math.isfinite(reached):
            return step, "not finite"
        (grad,) = torch.autograd.grad(value, x)
        x.grad = grad.sign() if signed else grad
        optimizer.step()
        with torch.no_grad():
            if langevin is not None:
                x.add_(langevin(step), alpha=rate)
            x.copy_(torch.minimum(torch.maximum(x, low), high))
        report(step + 1, reached)
    return len(rates), "steps exhausted"
