"""Plain Flower on the digits, with the network, sizes and training that `benchmarks/flower.py` gives fedveil; no privacy."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from torch import nn

TRAINED, EPOCHS, BATCH, RATE = 1437, 2, 16, 0.1


def network() -> nn.Module:
    """2,410 parameters."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Two epochs of SGD on this node's examples."""
    torch.set_num_threads(1)
    part, parts = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
    digits, model = load_digits(), network()
    x = torch.tensor(digits.data[:TRAINED][part::parts] / 16, dtype=torch.float32)
    y = torch.tensor(digits.target[:TRAINED][part::parts])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(y)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    answer = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(answer), reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """What `FedAvg.start` does, with a line for each round: its seconds, and how many answered."""
    rounds, nodes = (int(os.environ[key]) for key in ("PLAIN_ROUNDS", "PLAIN_NODES"))
    while len(list(grid.get_node_ids())) < nodes:
        time.sleep(1)
    strategy, arrays = FedAvg(fraction_evaluate=0.0, min_available_nodes=nodes), ArrayRecord(network().state_dict())
    for number in range(1, rounds + 1):
        begin = time.monotonic()
        replies = list(grid.send_and_receive(strategy.configure_train(number, arrays, ConfigRecord(), grid)))
        mean, _ = strategy.aggregate_train(number, replies)
        if mean is None:
            raise RuntimeError("no client answered")
        arrays, line = mean, {"seconds": time.monotonic() - begin, "answers": sum(reply.has_content() for reply in replies)}
        with Path(os.environ["PLAIN_LOG"]).open("a") as log:
            log.write(json.dumps(line) + "\n")
