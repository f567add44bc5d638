"""Rounds of Flower's FedAvg in its simulation engine (Ray, two actors): `python flower_rounds.py --workload W1`."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])  # for its actors
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from common import chosen, new_model, serve, train


def client_app(work) -> ClientApp:  # type: ignore[no-untyped-def]
    """A client that trains."""
    app = ClientApp()

    @app.train()
    def _train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model = new_model(work)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(model, work, int(context.node_config["partition-id"]))
        answer = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": work.examples})}
        return Message(content=RecordDict(answer), reply_to=message)

    return app


def server_app(work) -> ServerApp:  # type: ignore[no-untyped-def]
    """A server that takes turns; a round is what `FedAvg.start` does in one."""
    app = ServerApp()

    @app.main()
    def _main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=work.clients)
        arrays, number = ArrayRecord(new_model(work).state_dict()), 0

        def one() -> None:
            nonlocal arrays, number
            number += 1
            messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
            mean, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
            if mean is None:
                raise RuntimeError("no client answered")
            arrays = mean

        serve(one)

    return app


if __name__ == "__main__":
    chosen_work = chosen()
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server_app(chosen_work), client_app(chosen_work), chosen_work.clients, backend_config=resources)
