"""Runs over several machines, on Flower: wire format, client consent and ledger, server and client processes."""

REGISTERED = {
    "engine.flower": "fedveil.deploy.grid_engine:FlowerSimulation",
    "command.serve": "fedveil.deploy.commands:serve",
    "command.join": "fedveil.deploy.commands:join",
    "command.net": "fedveil.deploy.commands:net_app",
}
