"""NumPyClient with a ServerApp of the same time, and a part of the model that stays in the client's state."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp
from sklearn.datasets import load_digits

X, Y = load_digits(return_X_y=True)
X = X / 16


class DigitsClient(NumPyClient):
    def __init__(self, context: Context) -> None:
        self.state, self.own = context.state, slice(int(context.node_config["partition-id"]), 1500, 5)

    def fit(self, parameters, config):
        w, b = parameters
        if "head" in self.state.array_records:
            (b,) = self.state["head"].to_numpy_ndarrays()
        for _ in range(20):
            odds = np.exp(X[self.own] @ w + b)
            errors = (odds / odds.sum(1, keepdims=True) - np.eye(10)[Y[self.own]]) / len(odds)
            w, b = w - 0.5 * X[self.own].T @ errors, b - 0.5 * errors.sum(0)
        self.state["head"] = ArrayRecord([b])
        return [w, b], len(odds), {"train_error": float(np.abs(errors).sum())}

    def evaluate(self, parameters, config):
        right = np.mean((X[1500:] @ parameters[0] + parameters[1]).argmax(1) == Y[1500:])
        return 1 - float(right), len(X[1500:]), {"accuracy": float(right)}


def client_fn(context: Context) -> Client:
    return DigitsClient(context).to_client()


def server_fn(context: Context) -> ServerAppComponents:
    start = ndarrays_to_parameters([np.zeros((64, 10)), np.zeros(10)])
    strategy = FedAvg(initial_parameters=start, min_available_clients=5)
    rounds = context.run_config["num-server-rounds"]
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds, round_timeout=60))


app = ClientApp(client_fn)
server = ServerApp(server_fn=server_fn)
