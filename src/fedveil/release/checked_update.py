"""Whether what training gave may leave as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fedveil.errors import UpdateRefused
from fedveil.release.evaluation_counts import COUNTS
from fedveil.release.release_layout import ReleaseLayout

if TYPE_CHECKING:
    from torch import Tensor


def checked(update: object, extras: Mapping[str, Tensor], parts: ReleaseLayout, max_norm: float) -> Tensor:
    """The flat vector [D] of what training gave.

    Raises:
        UpdateRefused: it may not leave; what cannot even be looked at may not.
    """
    try:
        return _checked(update, extras, parts, max_norm)
    except UpdateRefused:
        raise
    except Exception as error:
        raise UpdateRefused(f"what training gave cannot be read: {type(error).__name__}") from error


def _checked(update: object, extras: Mapping[str, Tensor], parts: ReleaseLayout, max_norm: float) -> Tensor:
    if update is None:
        raise UpdateRefused("training gave no update")
    if not isinstance(extras, Mapping):
        raise UpdateRefused(f"Local.extras must stay a dictionary, got {type(extras).__name__}")
    if type(update) is not torch.Tensor or update.dtype != torch.float32:
        kind = getattr(update, "dtype", type(update).__name__)
        raise UpdateRefused(f"the update must be a float32 tensor, got {kind} ({type(update).__name__})")
    if update.layout != torch.strided or update.requires_grad:
        kind = "one that requires a gradient" if update.requires_grad else str(update.layout)
        raise UpdateRefused(f"the update must be a plain dense tensor, got {kind}")
    if tuple(update.shape) != (parts.model.dimension,):
        raise UpdateRefused(f"the update must have shape ({parts.model.dimension},), got {tuple(update.shape)}")
    vector = parts.flat(torch.detach(update), extras)  # an object of the door's own, without what was attached to it
    learned, others = parts.parted(vector)
    norms = {
        name: float(torch.linalg.vector_norm(part, dtype=torch.float64)) for name, part in ((None, learned), *others.items())
    }
    if not all(map(math.isfinite, norms.values())):
        kind = "NaN" if bool(vector.isnan().any()) else "infinite values"
        raise UpdateRefused(f"the update contains {kind} (a smaller learning rate or a batch_clip may help)")
    norms.pop(COUNTS, None)  # they count examples, and have a bound of their own
    norm = math.hypot(*norms.values())
    if norm > max_norm:
        raise UpdateRefused(f"the update has norm {norm:.4g}, above training.max_update_norm = {max_norm:g}")
    return vector
