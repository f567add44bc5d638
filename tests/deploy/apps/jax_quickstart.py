"""JAX, message API: a tree of parameters as a list of arrays, evaluation by the server."""

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits

X, Y = load_digits(return_X_y=True)
X = jnp.asarray(X / 16)
app = ClientApp()
server = ServerApp()
TREE = jax.tree.structure({"b": 0, "scale": 0, "w": 0})


def scores(params: dict, x: jax.Array) -> jax.Array:
    return params["scale"] * (x @ params["w"] + params["b"])


def loss_of(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.mean(jax.nn.log_softmax(scores(params, x))[jnp.arange(len(y)), y])


@app.train()
def train(msg: Message, context: Context) -> Message:
    params = jax.tree.unflatten(TREE, [jnp.asarray(a) for a in msg.content["arrays"].to_numpy_ndarrays()])
    own = slice(int(context.node_config["partition-id"]), 1500, int(context.node_config["num-partitions"]))
    for _ in range(20):
        loss, slope = jax.value_and_grad(loss_of)(params, X[own], Y[own])
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, slope)
    metrics = {"train_loss": float(loss), "num-examples": len(Y[own])}
    arrays = ArrayRecord([np.asarray(leaf) for leaf in jax.tree.leaves(params)])
    return Message(content=RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)}), reply_to=msg)


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    params = jax.tree.unflatten(TREE, arrays.to_numpy_ndarrays())
    right = jnp.mean(scores(params, X[1500:]).argmax(1) == Y[1500:])
    return MetricRecord({"accuracy": float(right)})


@server.main()
def main(grid: Grid, context: Context) -> None:
    rounds = context.run_config["num-server-rounds"]
    strategy = FedAvg(fraction_evaluate=0.0)
    start = ArrayRecord([np.zeros(10, np.float32), np.array(1, np.float32), np.zeros((64, 10), np.float32)])
    result = strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds, evaluate_fn=global_evaluate)
    context.state["final"] = result.arrays
