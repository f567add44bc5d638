"""Runs over several machines, on Flower: wire format, consent and ledger at the client, the processes of server and client."""

REGISTERED = {
    "engine.flower": "fedveil.deploy.grid_engine:FlowerSimulation",
    "command.serve": "fedveil.deploy.commands:serve",
    "command.join": "fedveil.deploy.commands:join",
    "command.net": "fedveil.deploy.commands:net_app",
}
