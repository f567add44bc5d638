"""The server's side of the door: a release that arrived is held against the server's own plan, and never trusted.

Whatever a client says, what the server uses is integers (or floats, under a plan that promises nothing) of the shape, type and
size that its own plan allows. Reads, reason, clip, noise and price come from that plan.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.errors import UpdateRefused
from fedveil.ledger.named_bits import naming_bits
from fedveil.mechanism.cost import on_grid
from fedveil.mechanism.plan import LocalDpSgd, Plan, Raw, lets_statistics_out, reason_of
from fedveil.release.door import Door
from fedveil.release.sealed import Contribution, SealedUpload

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fedveil.flower.bit_packing import Bounds
    from fedveil.flower.round_messages import ReleaseMessage

_DEVIATIONS = 40.0
"""No Gaussian noise is ever so many standard deviations away from 0."""


def received_upload(door: Door, plan: Plan, message: ReleaseMessage) -> SealedUpload:
    """The upload that arrived, and the row by which the server's ledger copies the client's.

    Raises:
        UpdateRefused: it is not what the plan allows.
    """
    task = message.task
    vector = _checked(door, plan, message.released, noised=plan.place == "upload")
    buffers = _statistics(plan, message.buffers)
    sealed = door.sealed(vector, plan, task.client, task.round, reason=reason_of(plan), weight=task.weight, buffers=buffers)
    return naming_its_bits(door, sealed, message.salt)


def received_contribution(door: Door, plan: Plan, message: ReleaseMessage) -> Contribution:
    """The summand that arrived; its clip is proven again.

    Raises:
        UpdateRefused: it is not what the plan allows.
    """
    task = message.task
    vector = _checked(door, plan, message.released, noised=plan.place == "upload")
    buffers = _statistics(plan, message.buffers)
    return Contribution(task.client, (), reason_of(plan), task.weight, vector, None, buffers)


def release_bounds(door: Door, plan: Plan | Raw) -> Bounds:
    """The bounds of the integers that leave under a plan; none where floats leave."""
    exact = isinstance(plan, Plan) and on_grid(plan, reason_of(plan), door.layout)
    return door.parts.bounds(plan) if isinstance(plan, Plan) and exact else ()


def naming_its_bits(door: Door, sealed: SealedUpload, salt: str) -> SealedUpload:
    """The upload by a row that says which bits leave: both ledgers name the same ones, and count them once when sent again.

    Ledgers are published, and the salt is not: of a small model the upload could be found by trying.
    """
    digest = hashlib.sha256(salt.encode() + door.leaving(sealed.upload).numpy().tobytes()).hexdigest()
    return replace(sealed, entry=naming_bits(sealed.entry, digest))


def _checked(door: Door, plan: Plan, released: Tensor | None, *, noised: bool) -> Tensor:
    if released is None:
        raise UpdateRefused("no release arrived")
    integers = on_grid(plan, reason_of(plan), door.layout)
    if released.dtype != (torch.int64 if integers else torch.float32):
        raise UpdateRefused(f"the release is {released.dtype}, and the plan asks for {'integers' if integers else 'float32'}")
    if not integers:
        norm = float(torch.linalg.vector_norm(released, dtype=torch.float64))
        if not norm <= _most_float(door, plan):
            raise UpdateRefused(f"the release has norm {norm:.4g}, more than the plan allows")
        return released
    _check_integers(door, plan, released.numpy(), noised=noised)
    return released


def _check_integers(door: Door, plan: Plan, integers: NDArray[np.int64], *, noised: bool) -> None:
    """Hold the norm of each group, and of the whole, against clip and noise, in units of the group's grid step."""
    groups, grid = door.parts.groups(plan), door.parts.grid(plan)
    if plan.support is not None and integers[: door.layout.dimension][~plan.support.numpy()].any():
        raise UpdateRefused("the release has coordinates that the plan does not send")
    power = allowed = 0.0
    for (part, std, clip), (_, k) in zip(groups, grid, strict=True):
        step = 2.0 ** (k + plan.mechanism.shift)
        norm = float(np.linalg.norm(integers[part].astype(np.float64))) * step
        room = _noise_room(std, step, part.stop - part.start) if noised and std else 0.0
        bound = min(clip, plan.clip if part.stop <= door.layout.dimension else math.inf)
        if not norm <= (bound + room) * (1 + 1e-9):
            raise UpdateRefused(f"a part of the release has norm {norm:.4g}, and clip and noise allow {bound + room:.4g}")
        if part.stop <= door.layout.dimension:
            power, allowed = power + norm**2, allowed + room**2
    if not math.sqrt(power) <= (plan.clip + math.sqrt(allowed)) * (1 + 1e-9):
        raise UpdateRefused(f"the release has norm {math.sqrt(power):.4g}, and the clip is {plan.clip:.4g}")


def _noise_room(std: float, step: float, count: int) -> float:
    """A bound on the norm of that many numbers of noise that honest noise never reaches; rounding to the grid included."""
    return std * (math.sqrt(count) + _DEVIATIONS) + step * math.sqrt(count)


def _most_float(door: Door, plan: Plan) -> float:
    """The largest norm of a float release: what the door lets pass, and the noise that the plan adds to it."""
    stds = [std for _, std, _ in door.parts.groups(plan)]
    noise = max(stds, default=0.0) if not isinstance(plan, LocalDpSgd) else 0.0
    clip = math.hypot(plan.clip, *(extra.clip for extra in plan.extras.values()))
    return min(door.max_norm, clip) * (1 + 1e-5) + _noise_room(noise, 0.0, door.parts.dimension)


def _statistics(plan: Plan, buffers: Tensor | None) -> Tensor | None:
    if buffers is None:
        return None
    if not lets_statistics_out(plan, reason_of(plan)):
        raise UpdateRefused("batch statistics came with a release that promises something")
    return buffers
