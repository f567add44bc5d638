"""The client's computation as the attacker repeats it: differentiable in the examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedveil.attacks.attack_types import KnownTraining, ModelFn
from fedveil.errors import ConfigError
from fedveil.training.params import called_with, copied, trained_parameters

Simulation = Callable[[Tensor, Tensor], Tensor]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def prepared(model_fn: ModelFn, state: Mapping[str, Tensor], bn_mode: str, buffers: Mapping[str, Tensor] | None) -> nn.Module:
    """The model at `state`, deterministic: dropout off, batch normalisation as `bn_mode` says.

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
    """The parts of a flat vector (d,), named and shaped like the tensors of `like`."""
    parts = torch.split(vector, [t.numel() for t in like.values()])
    return {name: part.view(t.shape) for (name, t), part in zip(like.items(), parts, strict=True)}


def flat(tensors: Iterator[Tensor] | tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """Tensors one after the other in one vector."""
    return torch.cat([t.reshape(-1) for t in tensors])


def gradient(module: nn.Module, x: Tensor, y: Tensor, create_graph: bool = False) -> Tensor:
    """Gradient of the mean cross-entropy by the trained parameters, flat (d,).

    x: (n, *shape). y: classes int64 (n,), or class probabilities (n, classes).
    """
    with sdpa_kernel(SDPBackend.MATH):  # the faster kernels of attention have no second derivative
        loss = F.cross_entropy(module(x), y)
    return flat(torch.autograd.grad(loss, tuple(trained_parameters(module).values()), create_graph=create_graph))


def bounded(tensors: Sequence[Tensor], bound: float) -> list[Tensor]:
    """The tensors scaled by one factor to a joint L2 norm of at most `bound`, differentiably."""
    norm = (torch.stack([t.square().sum() for t in tensors]).sum() + 1e-30).sqrt()
    return [t * (bound / norm).clamp_max(1.0) for t in tensors]


def batches(local: KnownTraining, n: int) -> list[Tensor]:
    """Indices of the examples of each local step: `local.order` if known, else consecutive batches, epoch after epoch."""
    if local.order is not None:
        return [torch.tensor(indices) for indices in local.order]
    size = min(local.batch or n, n)
    chunks = [torch.arange(first, min(first + size, n)) for first in range(0, n, size)]
    return [chunks[k % len(chunks)] for k in range(local.steps)]


def simulation(module: nn.Module, local: KnownTraining | None) -> Simulation:
    """(x, y) -> effective gradient (w_0 - w_K) / (lr K), flat (d,), with its graph.

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
    """Parameters after `local.steps` steps, differentiable in x and y.

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
