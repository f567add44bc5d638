"""The server's step: what its part of the method makes of a round's uploads, for the server's optimiser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fedveil.errors import ConfigError
from fedveil.methods.parts import Summed, SumServer, UploadServer

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.mechanism.plan import Plan, Upload
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting
    from fedveil.training.local import State


def server_step(method: Method, s: Setting, state: State, uploads: Sequence[Upload], model: Tensor) -> tuple[State, Tensor]:
    """Return the next state of the method's server, and its step [d] of the global model.

    The step is divided by the largest clip of the round where the server's rate is relative to it.

    Raises:
        ConfigError: the server is of no known type, or its step is no vector.
    """
    server = method.server(s)
    if isinstance(server, SumServer):
        state, step = server.step(s, state, Summed.of(uploads, model))
    elif isinstance(server, UploadServer):
        state, step = server.step(s, state, [replace(upload, start=model) for upload in uploads])
    else:
        raise ConfigError(f"{method.name}: `server` returned {type(server).__name__}; allowed are SumServer and UploadServer")
    if not isinstance(step, torch.Tensor) or step.shape != model.shape or not step.is_floating_point():
        raise ConfigError(
            f"{method.name}: the step of its server is {_kind(step)}; "
            f"it must be floats, one for each of the model's {len(model)} coordinates"
        )
    return state, step / max(whole_clip(upload.plan) for upload in uploads) if s.server.relative_to_clip else step


def whole_clip(plan: Plan) -> float:
    """The bound on a whole update: clip C, or the norm of the clips of its layers where these alone bound it."""
    return plan.clip if plan.layer_clip is None or math.isfinite(plan.clip) else float(plan.layer_clip.norm())


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
