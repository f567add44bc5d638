"""plain.py with noise at each client."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits

from fedveil import dp_mod

CLIENTS, ROUNDS = 100, 15
X, Y = load_digits(return_X_y=True)
X = X / 16 - 0.5
client = ClientApp(mods=[dp_mod(clip=0.5, epsilon=8.0, delta=1e-3, rounds=ROUNDS, ledger="~/flower-ledgers")])
server = ServerApp()


def gradients(w, b, x, y):
    scores = np.exp(x @ w + b)
    errors = (scores / scores.sum(1, keepdims=True) - np.eye(10)[y]) / len(y)
    return x.T @ errors, errors.sum(0)


@client.train()
def train(message: Message, context: Context) -> Message:
    own = np.arange(context.node_config["partition-id"], 1500, CLIENTS)
    w, b = message.content["arrays"].to_numpy_ndarrays()
    for _ in range(20):
        dw, db = gradients(w, b, X[own], Y[own])
        w, b = w - 0.5 * dw.astype("float32"), b - 0.5 * db.astype("float32")
    content = {"arrays": ArrayRecord([w, b]), "metrics": MetricRecord({"num-examples": len(own)})}
    return Message(RecordDict(content), reply_to=message)


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    w, b = arrays.to_numpy_ndarrays()
    return MetricRecord({"accuracy": float(np.mean(np.argmax(X[1500:] @ w + b, 1) == Y[1500:]))})


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(fraction_evaluate=0.0)
    start = ArrayRecord([np.zeros((64, 10), "float32"), np.zeros(10, "float32")])
    result = strategy.start(grid, start, ROUNDS, evaluate_fn=evaluate)
    print(result.evaluate_metrics_serverapp[ROUNDS])


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server, client, num_supernodes=CLIENTS)
