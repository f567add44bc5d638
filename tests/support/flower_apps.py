"""Apps of Flower in this process: a grid whose nodes are calls, and a small model that its clients train."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


def arrays(**values: Any) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in values.items()})


def model() -> ArrayRecord:
    """Parameters of three shapes, a number among them, and a buffer of integers."""
    return arrays(
        w=np.arange(6, dtype=np.float32).reshape(2, 3), b=np.float32(0.5), v=np.ones(4, np.float32), n=np.array([3, 4], np.int64)
    )


def instruction(record: ArrayRecord | None = None, kind: str = "train", **config: Any) -> Message:
    content = RecordDict({"arrays": record or model(), "config": ConfigRecord({"server-round": 1, **config})})
    return Message(content, dst_node_id=7, message_type=kind)


def context(partition: int | None = 0, node: int | None = None, run: int = 1) -> Context:
    """That of a node: in a simulation one for each part of the data, else one without any."""
    config = {} if partition is None else {"partition-id": partition, "num-partitions": 10}
    return Context(run_id=run, node_id=node or 7 + (partition or 0), node_config=config, state=RecordDict(), run_config={})


def answer(message: Message, record: ArrayRecord, /, **metrics: Any) -> Message:
    content = {"arrays": record, "metrics": MetricRecord({"num-examples": 10, **metrics})}
    return Message(RecordDict(content), reply_to=message)


def added(step: float) -> Callable[[Message, Context], Message]:
    """A train function that adds a number to all parameters, and another to the buffer."""

    def train(message: Message, context: Context) -> Message:
        found = {name: array.numpy() for name, array in message.content["arrays"].items()}
        moved = {name: a + (np.float32(step) if a.dtype.kind == "f" else 1) for name, a in found.items()}
        return answer(message, arrays(**moved), train_loss=0.25)

    return train


def values(message: Message) -> dict[str, Any]:
    assert not message.has_error(), message.error
    return {name: array.numpy() for name, array in message.content["arrays"].items()}


@dataclass
class AppGrid:
    """What strategies use of a grid; each message and each reply is a copy, and replies arrive in any order.

    fails: nodes that answer with an error, or not at all. asked: nodes of each call.
    """

    app: ClientApp
    nodes: int
    seed: int = 0
    fails: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    asked: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.contexts = {i + 100: context(i, i + 100) for i in range(self.nodes)}

    def get_node_ids(self) -> Iterable[int]:
        return self.random.sample(list(self.contexts), self.nodes)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        self.asked.append(sorted(m.metadata.dst_node_id for m in messages))
        replies = [self._reply(m) for m in messages if m.metadata.dst_node_id not in self.silent]
        return self.random.sample(replies, len(replies))

    def _reply(self, message: Message) -> Message:
        node, own = message.metadata.dst_node_id, deepcopy(message)
        if node in self.fails:
            return Message(Error(code=2, reason="the diagnosis"), reply_to=own)
        try:
            return deepcopy(self.app(own, self.contexts[node]))
        except Exception as problem:
            return Message(Error(code=2, reason=str(problem)), reply_to=own)
