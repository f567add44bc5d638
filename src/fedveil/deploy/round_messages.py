"""The messages of a round, and the check of a received release against the server's own plan.

    ROUND     to all clients of a round, the same bytes: model, previous model, public loss, public update, server state,
              plan state, statistics, and the receipt of the round before
    TASK      to one client: its number and its weight
    RELEASE   from one client: the integers from its door, or the floats of a release that promises nothing
    REFUSAL   from one client: why it takes no part

With secure aggregation, a client answers a round with READY, and SET, the same bytes to all clients of a set, with MASKED; their
content is that of `fedveil.secure_aggregation`.

No message contains a client's private or policy state, its loss, its number of examples, or why its training failed.

Whatever a client sends, the server only uses integers (or floats, under a plan that promises nothing) of the shape, type and size
that its own plan allows. Reads, reason, clip, noise and price come from that plan.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedveil.deploy.wire_format import (
    Bounds,
    Kind,
    WireError,
    WireMessage,
    by_block,
    decoded,
    digest,
    encoded,
    require_parts,
    run_name,
    text,
    whole_number,
)
from fedveil.errors import FedveilError, UpdateRefused
from fedveil.federation.plain_state import decode, encode
from fedveil.ledger.budgeted_ledger import naming_bits
from fedveil.mechanism.cost import on_grid, plan_digest
from fedveil.mechanism.plan import COUNTS, LocalDpSgd, Plan, Raw, Released, lets_statistics_out, reason_of, step_of
from fedveil.release.door import Door
from fedveil.release.sealed import Contribution, SealedUpload
from fedveil.training.local import State

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fedveil.training.params import Layout


_TREE, _RECEIPT, _CONTENT = "tree", 2**16, "content"
_TASK = ("run", "round", "client", "weight")


@dataclass(frozen=True)
class RoundMessage:
    """Message to all clients of a round; `plan_state` is the common policy's if uploads are summed, else empty.

    `receipt`: of the round before (see `experiment.receipts`), or an empty text.
    """

    run: str
    released: Released
    plan_state: State
    buffers: Tensor | None
    receipt: str = ""


@dataclass(frozen=True)
class TaskMessage:
    """Message to one client."""

    run: str
    round: int
    client: int
    weight: float


@dataclass(frozen=True)
class ReleaseMessage:
    """Release of one client: int64 [D] or float32 [D], or None if a plan that promises nothing refused its update.

    `plan`: digest of its plan. `salt`: of the digest by which both ledgers identify it. `buffers`: batch statistics, in runs that
    release these.
    """

    task: TaskMessage
    plan: str
    salt: str
    released: Tensor | None
    buffers: Tensor | None = None


@dataclass(frozen=True)
class RefusalMessage:
    """Reason why one client takes no part."""

    task: TaskMessage
    reason: str


def round_bytes(message: RoundMessage) -> bytes:
    """Return the message as bytes."""
    released = message.released
    content = {
        "model": released.model,
        "previous": released.previous,
        "public_loss": released.public_loss,
        "public_update": released.public_update,
        "server": released.server,
        "plan_state": message.plan_state,
        "buffers": message.buffers,
    }
    tensors: dict[str, Tensor] = {}
    fields = {"run": message.run, "round": released.round, "receipt": message.receipt, _TREE: encode(content, tensors, "")}
    return encoded(WireMessage(Kind.ROUND, fields, {name: tensor.numpy() for name, tensor in tensors.items()}))


def read_round(content: bytes, dimension: int) -> RoundMessage:
    """Return the message that the server sent to all.

    Args:
        dimension: d, of the models.

    Raises:
        WireError: it is invalid, or its models are not vectors of finite numbers of that dimension.
    """
    message = decoded(content, Kind.ROUND)
    require_parts(message, ("run", "round", "receipt", _TREE), message.arrays)
    try:
        tree = decode(message.fields[_TREE], {name: torch.from_numpy(array) for name, array in message.arrays.items()})
        keys = {"model", "previous", "public_loss", "public_update", "server", "plan_state", "buffers"}
        if type(tree) is not dict or set(tree) != keys or not all(type(tree[k]) is dict for k in ("server", "plan_state")):
            raise WireError("a round without its parts")
        named: dict[str, Tensor] = {}
        if encode(tree, named, "") != message.fields[_TREE] or named.keys() != message.arrays.keys():
            raise WireError("a round with more than its parts, or in another form")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise WireError(f"a damaged round ({type(problem).__name__})") from None
    for name in ("model", "previous", "public_update"):
        if name == "model" or tree[name] is not None:
            _check_vector(tree[name], dimension, name)
    loss, buffers = tree["public_loss"], tree["buffers"]
    if not (loss is None or type(loss) is float) or not (buffers is None or _finite_floats(buffers)):
        raise WireError("a round with a public loss or statistics that are no numbers")
    released = Released(
        whole_number(message, "round"),
        tree["model"],
        tree["previous"],
        loss,
        server=tree["server"],
        public_update=tree["public_update"],
    )
    return RoundMessage(run_name(message), released, tree["plan_state"], buffers, text(message, "receipt", _RECEIPT))


def task_bytes(task: TaskMessage) -> bytes:
    """Return the message as bytes."""
    return encoded(WireMessage(Kind.TASK, _task_fields(task)))


def read_task(content: bytes) -> TaskMessage:
    """Return the message that the server sent to one client; raise WireError if it is invalid."""
    message = decoded(content, Kind.TASK)
    require_parts(message, _TASK)
    return _task_of(message)


def reply_bytes(reply: ReleaseMessage | RefusalMessage, bounds: Bounds = ()) -> bytes:
    """Return the message as bytes.

    Args:
        bounds: of a release's integers, from its plan alone (`ReleaseLayout.bounds`).

    Raises:
        ValueError: an integer exceeds its bound.
    """
    fields = _task_fields(reply.task)
    if isinstance(reply, RefusalMessage):
        printable = "".join(c if c.isprintable() else " " for c in reply.reason)[:1000]
        return encoded(WireMessage(Kind.REFUSAL, fields | {"reason": printable}))
    arrays: dict[str, NDArray[Any]] = {}
    if reply.released is not None:
        arrays["released"] = reply.released.numpy()
    if reply.buffers is not None:
        arrays["buffers"] = reply.buffers.numpy()
    integers = reply.released is not None and reply.released.dtype == torch.int64
    packed = {"released": bounds} if integers else {}
    return encoded(WireMessage(Kind.RELEASE, fields | {"plan": reply.plan, "salt": reply.salt}, arrays, packed))


def read_reply(
    content: bytes, task: TaskMessage, dimension: int, bounds: Bounds | None = None
) -> ReleaseMessage | RefusalMessage:
    """Return a client's answer to that task.

    Args:
        dimension: D, of a release. bounds: of its integers, from the plan; None accepts those that the answer states.

    Raises:
        WireError: it is invalid; it answers another task; or it has another shape, type or width than a release has.
    """
    message = decoded(content, Kind.RELEASE, Kind.REFUSAL, most_packed=dimension)
    release = message.kind is Kind.RELEASE
    require_parts(message, (*_TASK, *(("plan", "salt") if release else ("reason",))), ("released", "buffers") if release else ())
    answered = _task_of(message)
    if answered != task:
        wrong = [f"{k} {v} where {getattr(task, k)} was asked" for k, v in vars(answered).items() if v != getattr(task, k)]
        raise WireError(f"an answer to another task: {', '.join(wrong)}")
    if message.kind is Kind.REFUSAL:
        return RefusalMessage(task, text(message, "reason"))
    buffers = message.arrays.get("buffers")
    statistics = None if buffers is None else torch.from_numpy(buffers)
    if statistics is not None and not _finite_floats(statistics):
        raise WireError("batch statistics that are no finite numbers")
    array = message.arrays.get("released")
    released = None if array is None else torch.from_numpy(np.ascontiguousarray(array))
    if released is not None and (released.shape != (dimension,) or released.dtype not in (torch.int64, torch.float32)):
        raise WireError(f"a release of shape {tuple(released.shape)} and type {released.dtype}, expected shape [{dimension}]")
    if bounds is not None and any(found != by_block(bounds, dimension) for found in message.packed.values()):
        raise WireError("integers that are packed in another width than their plan gives")
    return ReleaseMessage(task, digest(message, "plan"), digest(message, "salt"), released, statistics)


def kind_of(content: bytes) -> Kind:
    """Return whether the first part of a message is a round or a set; raise WireError if it is neither."""
    for kind in (Kind.SET, Kind.ROUND):
        if content[:7] == encoded(WireMessage(kind, {}))[:7]:
            return kind
    raise WireError("a message that is neither a round nor a set")


def masks_bytes(kind: Kind, task: TaskMessage, content: bytes) -> bytes:
    """Return an answer with content of secure aggregation as bytes."""
    return encoded(WireMessage(kind, _task_fields(task), {_CONTENT: np.frombuffer(content, np.uint8)}))


def read_masks(answer: bytes, kind: Kind, task: TaskMessage) -> bytes:
    """Return the content of a client's answer; raise WireError if it is invalid, a refusal, or the answer to another task."""
    message = decoded(answer, kind, Kind.REFUSAL)
    refused = message.kind is Kind.REFUSAL
    require_parts(message, (*_TASK, "reason") if refused else _TASK, () if refused else (_CONTENT,))
    if _task_of(message) != task:
        raise WireError("an answer to another task")
    if refused:
        raise WireError(f"refused: {text(message, 'reason')}")
    return _content(message)


def set_bytes(run: str, round: int, content: bytes) -> bytes:
    """Return the request for the masked vectors of a set as bytes."""
    return encoded(WireMessage(Kind.SET, {"run": run, "round": round}, {_CONTENT: np.frombuffer(content, np.uint8)}))


def read_set(content: bytes, task: TaskMessage) -> bytes:
    """Return the content of a request; raise WireError if it is invalid, or of another round than the task."""
    message = decoded(content, Kind.SET)
    require_parts(message, ("run", "round"), (_CONTENT,))
    if (run_name(message), whole_number(message, "round")) != (task.run, task.round):
        raise WireError(f"a task for round {task.round}, with the set of another one")
    return _content(message)


def _content(message: WireMessage) -> bytes:
    array = message.arrays.get(_CONTENT)
    if array is None or array.dtype != np.uint8 or array.ndim != 1:
        raise WireError(f"a {message.kind.name.lower()} without its content")
    return array.tobytes()


def plan_name(plan: Plan | Raw, layout: Layout) -> str:
    """Return a digest of everything in a plan that determines the release; both sides must have made the same plan.

    Raises:
        FedveilError: the plan depends on the private update, so no server could check a release against it.
    """
    if isinstance(plan, Raw):
        raise FedveilError(
            f"the plan reads private data ({plan.reason}), so the server cannot check a release against it: run.engine = "
            f"'flower' needs a variant whose plans are computed from releases, such as method.variant = 'proven'"
        )
    rest = (plan.place, plan.clamp, reason_of(plan), step_of(plan))
    return hashlib.sha256(plan_digest(plan, layout) + repr(rest).encode()).hexdigest()


def _task_fields(task: TaskMessage) -> dict[str, Any]:
    return {"run": task.run, "round": task.round, "client": task.client, "weight": task.weight}


def _task_of(message: WireMessage) -> TaskMessage:
    weight = message.fields.get("weight")
    if type(weight) is not float or not 0 < weight <= 1:
        raise WireError("a weight outside (0, 1]")
    return TaskMessage(run_name(message), whole_number(message, "round"), whole_number(message, "client"), weight)


def _check_vector(value: Any, dimension: int, name: str) -> None:
    if not _finite_floats(value) or value.shape != (dimension,):
        raise WireError(f"the {name} must be [{dimension}] finite numbers")


def _finite_floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32 and bool(value.isfinite().all())


_DEVIATIONS = 40.0
"""Number of standard deviations that Gaussian noise never exceeds in practice."""


def received_upload(door: Door, plan: Plan, message: ReleaseMessage) -> SealedUpload:
    """Return the received upload, with the row by which the server's ledger copies the client's.

    Raises:
        UpdateRefused: it is not what the plan allows.
    """
    task = message.task
    vector = _checked(door, plan, message.released, noised=plan.place == "upload")
    buffers = _statistics(plan, message.buffers)
    sealed = door.sealed(vector, plan, task.client, task.round, reason=reason_of(plan), weight=task.weight, buffers=buffers)
    return naming_its_bits(door, sealed, message.salt)


def received_contribution(door: Door, plan: Plan, message: ReleaseMessage) -> Contribution:
    """Return the received contribution to a sum; its clip is checked again.

    Raises:
        UpdateRefused: it is not what the plan allows.
    """
    task = message.task
    vector = _checked(door, plan, message.released, noised=plan.place == "upload")
    buffers = _statistics(plan, message.buffers)
    return Contribution(task.client, (), reason_of(plan), task.weight, vector, None, buffers)


def release_bounds(door: Door, plan: Plan | Raw) -> Bounds:
    """Return the bounds of the integers released under a plan; none if it releases floats."""
    exact = isinstance(plan, Plan) and on_grid(plan, reason_of(plan), door.layout)
    return door.parts.bounds(plan) if isinstance(plan, Plan) and exact else ()


def naming_its_bits(door: Door, sealed: SealedUpload, salt: str) -> SealedUpload:
    """Return the upload with a ledger row that identifies its bits, so that both ledgers count them once when sent again.

    Ledgers are published but the salt is not: otherwise a small model's upload could be found by trial.
    """
    digest = hashlib.sha256(salt.encode() + door.released_bits(sealed.upload).numpy().tobytes()).hexdigest()
    return replace(sealed, entry=naming_bits(sealed.entry, digest))


def _checked(door: Door, plan: Plan, released: Tensor | None, *, noised: bool) -> Tensor:
    if released is None:
        raise UpdateRefused("no release arrived")
    integers = on_grid(plan, reason_of(plan), door.layout)
    if released.dtype != (torch.int64 if integers else torch.float32):
        raise UpdateRefused(f"the release is {released.dtype}, and the plan asks for {'integers' if integers else 'float32'}")
    if not integers:
        if not bool(released.isfinite().all()):
            raise UpdateRefused("the release has numbers that are not finite")
        parts = door.parts.places.items()
        counts = [place for name, place in parts if name == COUNTS and isinstance(plan, LocalDpSgd)]  # with a bound of their own
        bounded = torch.cat([released[: counts[0].start], released[counts[0].stop :]]) if counts else released
        norm = float(torch.linalg.vector_norm(bounded, dtype=torch.float64))
        if not norm <= _most_float(door, plan):
            raise UpdateRefused(f"the release has norm {norm:.4g}, more than the plan allows")
        return released
    _check_integers(door, plan, released.numpy(), noised=noised)
    return released


def _check_integers(door: Door, plan: Plan, integers: NDArray[np.int64], *, noised: bool) -> None:
    """Check the norm of each group, and of the whole, against clip and noise, in units of the group's grid step."""
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
    """Return a bound that the norm of so many honest noise values never exceeds, including rounding to the grid."""
    return std * (math.sqrt(count) + _DEVIATIONS) + step * math.sqrt(count)


def _most_float(door: Door, plan: Plan) -> float:
    """Return the largest norm of a float release: the door's limit, plus the noise that the plan adds."""
    stds = [std for _, std, _ in door.parts.groups(plan)]
    noise = max(stds, default=0.0) if not isinstance(plan, LocalDpSgd) else 0.0
    clip = math.hypot(plan.clip, *(extra.clip for extra in plan.extras.values()))
    return min(door.max_norm, clip) * (1 + 1e-5) + _noise_room(noise, 0.0, door.parts.dimension)


def _statistics(plan: Plan, buffers: Tensor | None) -> Tensor | None:
    if buffers is None:
        return None
    if not lets_statistics_out(plan, reason_of(plan)):
        raise UpdateRefused(
            "the message holds batch-norm statistics, which carry no noise, although this release has a privacy guarantee: the "
            "client must keep them; check that it runs the same version of fedveil as the server"
        )
    return buffers
