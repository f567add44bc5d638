"""A strategy of the app's own: a schedule of learning rates, the best model so far, metrics of training in a figure."""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdagrad
from sklearn.datasets import load_digits

X, Y = load_digits(return_X_y=True)
X = X / 16
app = ClientApp()
server = ServerApp()


class Scheduled(FedAdagrad):
    """FedAdagrad that halves the clients' learning rate in the second round, and keeps the best model of the clients' scores."""

    best, kept = 0.0, None

    def configure_train(self, server_round, arrays, config, grid):
        if server_round == 2:
            config["lr"] /= 2
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.latest = arrays
        return arrays, metrics

    def aggregate_evaluate(self, server_round, replies):
        metrics = super().aggregate_evaluate(server_round, replies)
        if metrics is not None and metrics["accuracy"] > self.best:
            self.best, self.kept = metrics["accuracy"], self.latest
        return metrics


@app.train()
def train(msg: Message, context: Context) -> Message:
    own = slice(int(context.node_config["partition-id"]), 1500, int(context.node_config["num-partitions"]))
    arrays, lr = {name: array.numpy() for name, array in msg.content["arrays"].items()}, msg.content["config"]["lr"]
    w = arrays["w"]
    for _ in range(20):
        odds = np.exp(X[own] @ w)
        w = w - lr * X[own].T @ (odds / odds.sum(1, keepdims=True) - np.eye(10)[Y[own]]) / len(odds)
    metrics = {"train_loss": float(-np.log(odds / odds.sum(1, keepdims=True))[:, 0].mean()), "num-examples": len(odds)}
    return Message(RecordDict({"arrays": ArrayRecord({"w": Array(w)}), "metrics": MetricRecord(metrics)}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    right = np.mean((X[1500:] @ msg.content["arrays"]["w"].numpy()).argmax(1) == Y[1500:])
    return Message(RecordDict({"metrics": MetricRecord({"accuracy": float(right), "num-examples": 297})}), reply_to=msg)


@server.main()
def main(grid: Grid, context: Context) -> None:
    rounds = context.run_config["num-server-rounds"]
    strategy = Scheduled(eta=0.5, tau=0.1)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({"w": Array(np.zeros((64, 10)))}),
        train_config=ConfigRecord({"lr": 0.5}),
        num_rounds=rounds,
    )
    context.state["final"] = result.arrays
    context.state["best"] = ConfigRecord({"kept": strategy.kept is not None})
