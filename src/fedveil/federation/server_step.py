"""What the server's optimiser steps along: the aggregate of a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting
    from fedveil.release.plan import Plan, Upload


def server_direction(method: Method, s: Setting, uploads: Sequence[Upload], model: Tensor) -> Tensor:
    """The aggregate [d] of what was released; divided by the largest clip of the round where the rate is relative to it.

    Raises:
        ConfigError: the method's `aggregate` returned something else.
    """
    direction = method.aggregate(uploads, model)
    if not isinstance(direction, torch.Tensor) or direction.shape != model.shape or not direction.is_floating_point():
        raise ConfigError(
            f"{method.name}: `aggregate` returned {_kind(direction)}; "
            f"it must return floats, one for each of the model's {len(model)} coordinates"
        )
    return direction / max(whole_clip(upload.plan) for upload in uploads) if s.server.relative_to_clip else direction


def whole_clip(plan: Plan) -> float:
    """The bound on a whole update: clip C, or the norm of the clips of its layers where these alone bound it."""
    return plan.clip if plan.layer_clip is None or math.isfinite(plan.clip) else float(plan.layer_clip.norm())


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
