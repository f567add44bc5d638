"""PyTorch, message API: a state dict with batch normalisation, a learning rate in the instruction, evaluation by clients."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits

X, Y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
X = X.float() / 16
app = ClientApp()
server = ServerApp()


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 10))


@app.train()
def train(msg: Message, context: Context) -> Message:
    net, own = network(), slice(int(context.node_config["partition-id"]), 1500, int(context.node_config["num-partitions"]))
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=msg.content["config"]["lr"])
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(X[own]), Y[own])
        loss.backward()
        optimizer.step()
    metrics = {"train_loss": loss.item(), "num-examples": len(X[own])}
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    net = network().eval()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    right = (net(X[1500:]).argmax(1) == Y[1500:]).float().mean().item()
    metrics = {"eval_acc": right, "num-examples": len(X[1500:])}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


@server.main()
def main(grid: Grid, context: Context) -> None:
    rounds = context.run_config["num-server-rounds"]
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.5)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(network().state_dict()),
        train_config=ConfigRecord({"lr": 0.1}),
        num_rounds=rounds,
    )
    context.state["final"] = result.arrays
