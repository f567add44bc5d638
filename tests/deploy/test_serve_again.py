"""A server that ended early, and the same command again: it starts where nothing was charged, and else says how to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from federation_runs import config
from fedveil.deploy.network_folder import make_client_key, make_network
from fedveil.deploy.offers import ConsentingClients
from fedveil.deploy.programs import free_port
from fedveil.errors import ConfigError
from fedveil.experiment.run import run
from joined_clients import Machines, consent, served

pytest.importorskip("flwr", reason="needs flwr (pip install 'fedveil[flower]')")

from fedveil.deploy.serve import Serving, serve

SECTIONS = {"data": {"partition": {"kind": "iid", "clients": 2}}, "training": {"clients_per_round": 2, "local_steps": 1}}


def both(folder: Path) -> Machines:
    return Machines(folder / "clients", {number: consent(number) for number in range(2)})


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.filterwarnings("default")
def test_a_server_that_waited_in_vain_leaves_its_place_to_the_same_command(tmp_path: Path) -> None:
    network = make_network(tmp_path / "network", "127.0.0.1", free_port())
    for name in ("alice", "bob"):
        make_client_key(tmp_path / name)
        network.admit(tmp_path / f"{name}.pub")

    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        raise KeyboardInterrupt

    wanted = config({"name": "dp-fedavg"}, "server", **SECTIONS)
    with pytest.raises(KeyboardInterrupt):
        serve(wanted, Serving(network, tmp_path / "run", tell=tell))
    assert lines == ["clients: 0 consented, 1 needed"]
    result, _ = served(wanted, tmp_path / "run", both(tmp_path))
    assert len(result.history) == wanted.training.rounds


def test_a_server_that_ended_after_consents_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients may have charged by then, so that only the same run may ask them again."""
    wanted = config({"name": "dp-fedavg"}, "server", **SECTIONS)
    machines = both(tmp_path)

    def killed(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ConsentingClients, "answers", killed)
        served(wanted, tmp_path / "run", machines)
    with pytest.raises(ConfigError, match=f"resume an interrupted run with --resume {tmp_path / 'run'}$"):
        served(wanted, tmp_path / "run", machines)
    result, _ = served(wanted, tmp_path / "run", machines, resume=True)
    assert result.model.vector.equal(run(wanted, tmp_path / "inline").model.vector)
    with pytest.raises(ConfigError, match=r"choose another --out$"):
        served(wanted, tmp_path / "run", machines)
