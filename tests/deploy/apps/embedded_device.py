"""Devices with their data on the disk, mods of the app's own, a state, and a query by the server."""

import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedProx


def seconds_mod(msg: Message, context: Context, call_next) -> Message:
    """Add how long the device took, as monitoring mods do."""
    began = time.monotonic()
    reply = call_next(msg, context)
    if not reply.has_error() and "metrics" in reply.content:
        reply.content["metrics"]["seconds"] = time.monotonic() - began
    return reply


app = ClientApp(mods=[seconds_mod])
server = ServerApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    table = np.load(Path(str(context.node_config["dataset-path"])) / "table.npy")
    x, y = table[:, :-1], table[:, -1]
    weights = msg.content["arrays"]["weights"].numpy()
    for _ in range(10):
        weights = weights - 0.1 * x.T @ (x @ weights - y) / len(y)
    seen = context.state["seen"]["rounds"] if "seen" in context.state else 0
    context.state["seen"] = MetricRecord({"rounds": seen + 1, "records": len(y)})
    metrics = MetricRecord({"num-examples": len(y), "train_mse": float(np.mean((x @ weights - y) ** 2))})
    return Message(RecordDict({"arrays": ArrayRecord({"weights": Array(weights)}), "metrics": metrics}), reply_to=msg)


@app.query("state")
def state(msg: Message, context: Context) -> Message:
    return Message(RecordDict({"seen": context.state["seen"]}), reply_to=msg)


@server.main()
def main(grid: Grid, context: Context) -> None:
    rounds = context.run_config["num-server-rounds"]
    strategy = FedProx(fraction_evaluate=0.0, proximal_mu=0.1)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord({"weights": Array(np.zeros(4))}), num_rounds=rounds)
    asked = [Message(RecordDict(), dst_node_id=node, message_type=f"{MessageType.QUERY}.state") for node in grid.get_node_ids()]
    grid.send_and_receive(asked)
    context.state["final"] = result.arrays
