"""scikit-learn, message API: arrays without names, in a model that clients make anew in each round."""

import warnings

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

X, Y = load_digits(return_X_y=True)
X = X / 16
app = ClientApp()
server = ServerApp()


def model_of(arrays: ArrayRecord) -> LogisticRegression:
    model = LogisticRegression(max_iter=3, warm_start=True)
    model.classes_ = np.arange(10)
    model.coef_, model.intercept_ = arrays.to_numpy_ndarrays()
    return model


@app.train()
def train(msg: Message, context: Context) -> Message:
    model, own = model_of(msg.content["arrays"]), slice(int(context.node_config["partition-id"]), 1500, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it does not converge in so few steps
        model.fit(X[own], Y[own])
    metrics = {"train_logloss": log_loss(Y[own], model.predict_proba(X[own])), "num-examples": len(X[own])}
    content = RecordDict({"arrays": ArrayRecord([model.coef_, model.intercept_]), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    model = model_of(msg.content["arrays"])
    metrics = {"accuracy": float(model.score(X[1500:], Y[1500:])), "num-examples": len(X[1500:])}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


@server.main()
def main(grid: Grid, context: Context) -> None:
    rounds = context.run_config["num-server-rounds"]
    strategy = FedAvg()
    start = ArrayRecord([np.zeros((10, 64)), np.zeros(10)])
    result = strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds)
    context.state["final"] = result.arrays
