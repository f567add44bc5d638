"""Runs over several machines, on Flower: wire format, client consent and ledger, server and client processes."""

REGISTERED = {
    "engine.flower": "fedveil.deploy.grid_engine:FlowerSimulation",
    "command.serve": "fedveil.deploy.commands:serve_app",
    "command.join": "fedveil.deploy.commands:join_app",
    "command.net": "fedveil.deploy.commands:net_app",
}
