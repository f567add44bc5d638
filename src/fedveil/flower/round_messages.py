"""What server and client say to each other in a round, as messages of the wire format.

    ROUND     to all clients of a round, the same bytes: model, the one before, public loss, public update, server state,
              plan state, statistics
    TASK      to one client: its number and its weight
    RELEASE   from one client: the integers that left its door, or the floats of a release that promises nothing
    REFUSAL   from one client: why it takes no part

What a client keeps for itself (its private and policy state) is in none of them, and neither are its loss, its number of
examples, or why its training failed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedveil.errors import FedveilError
from fedveil.federation.plain_state import decode, encode
from fedveil.flower.bit_packing import Bounds, by_block
from fedveil.flower.wire_format import (
    Kind,
    WireError,
    WireMessage,
    decoded,
    digest,
    encoded,
    require_parts,
    run_name,
    text,
    whole_number,
)
from fedveil.mechanism.cost import plan_digest
from fedveil.mechanism.plan import Plan, Raw, Released, reason_of, step_of
from fedveil.training.local import State

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fedveil.training.params import Layout

_TREE = "tree"
_TASK = ("run", "round", "client", "weight")


@dataclass(frozen=True)
class RoundMessage:
    """What all clients of a round are told; `plan_state` is that of the common policy where uploads are summed, else empty."""

    run: str
    released: Released
    plan_state: State
    buffers: Tensor | None


@dataclass(frozen=True)
class TaskMessage:
    """What one client is told."""

    run: str
    round: int
    client: int
    weight: float


@dataclass(frozen=True)
class ReleaseMessage:
    """What left one client: int64 [D] or float32 [D], or None where a plan that promises nothing refused its update.

    `plan`: digest of the plan under which it left. `salt`: of the digest by which both ledgers name it. `buffers`: batch
    statistics, in runs that release these.
    """

    task: TaskMessage
    plan: str
    salt: str
    released: Tensor | None
    buffers: Tensor | None = None


@dataclass(frozen=True)
class RefusalMessage:
    """Why one client takes no part."""

    task: TaskMessage
    reason: str


def round_bytes(message: RoundMessage) -> bytes:
    """The message on the wire."""
    released = message.released
    told = {
        "model": released.model,
        "previous": released.previous,
        "public_loss": released.public_loss,
        "public_update": released.public_update,
        "server": released.server,
        "plan_state": message.plan_state,
        "buffers": message.buffers,
    }
    tensors: dict[str, Tensor] = {}
    fields = {"run": message.run, "round": released.round, _TREE: encode(told, tensors, "")}
    return encoded(WireMessage(Kind.ROUND, fields, {name: tensor.numpy() for name, tensor in tensors.items()}))


def read_round(content: bytes, dimension: int) -> RoundMessage:
    """The message that the server sent to all.

    Args:
        dimension: d, of the models.

    Raises:
        WireError: it is none, or its models are no vectors of finite numbers of that dimension.
    """
    message = decoded(content, Kind.ROUND)
    require_parts(message, ("run", "round", _TREE), message.arrays)
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
    return RoundMessage(run_name(message), released, tree["plan_state"], buffers)


def task_bytes(task: TaskMessage) -> bytes:
    """The message on the wire."""
    return encoded(WireMessage(Kind.TASK, _task_fields(task)))


def read_task(content: bytes) -> TaskMessage:
    """The message that the server sent to one client; raises WireError."""
    message = decoded(content, Kind.TASK)
    require_parts(message, _TASK)
    return _task_of(message)


def reply_bytes(reply: ReleaseMessage | RefusalMessage, bounds: Bounds = ()) -> bytes:
    """The message on the wire.

    Args:
        bounds: of the integers of a release, from its plan alone (`ReleaseLayout.bounds`).

    Raises:
        ValueError: an integer beyond its bound.
    """
    fields = _task_fields(reply.task)
    if isinstance(reply, RefusalMessage):
        shown = "".join(c if c.isprintable() else " " for c in reply.reason)[:1000]
        return encoded(WireMessage(Kind.REFUSAL, fields | {"reason": shown}))
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
    """A client's answer to that task.

    Args:
        dimension: D, of a release. bounds: of its integers, from the plan; None takes those that the answer states.

    Raises:
        WireError: it is none; it answers another task; or it brings another shape, type or width than a release has.
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
        raise WireError(f"a release of shape {tuple(released.shape)} and type {released.dtype} where [{dimension}] is due")
    if bounds is not None and any(found != by_block(bounds, dimension) for found in message.packed.values()):
        raise WireError("integers that are packed in another width than their plan gives")
    return ReleaseMessage(task, digest(message, "plan"), digest(message, "salt"), released, statistics)


def plan_name(plan: Plan | Raw, layout: Layout) -> str:
    """A digest of all of a plan that decides what leaves; both sides make the plan, and must have made the same.

    Raises:
        FedveilError: the plan is made from the private update, so that no server could hold a release against it.
    """
    if isinstance(plan, Raw):
        raise FedveilError(
            f"the plan reads private data ({plan.reason}), and a server can check no release against it: run.engine = 'flower' "
            f"needs a variant whose plans are made of what was released, such as method.variant = 'proven'"
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
