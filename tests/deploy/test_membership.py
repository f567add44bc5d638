"""A network over the years: clients that leave or change keys, certificates and consents that end, upgrades."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedveil.cli.app import app
from fedveil.deploy.consent import ConsentFile, ConsentRefused, require_not_ended
from fedveil.deploy.join import JoinedClient, Joining, advice
from fedveil.deploy.membership import SeenClients, expiry, renew, server_expiry
from fedveil.deploy.network_folder import NetworkFolder, make_client_key, make_network, open_network
from fedveil.deploy.offers import offer_bytes, offer_of, read_consent
from fedveil.deploy.programs import free_port
from fedveil.errors import ConfigError
from fedveil.experiment.run import run
from joined_clients import consent, machines, served, small
from port_visitor import asked, request, signed

DAY = 86400.0


def command(network: NetworkFolder, *words: str) -> str:
    done = CliRunner().invoke(app, ["net", *words, "--dir", str(network.path)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def network(tmp_path: Path) -> NetworkFolder:
    made = make_network(tmp_path / "network", "127.0.0.1", free_port())
    for name in ("alice", "bob"):
        make_client_key(tmp_path / name)
        made.admit(tmp_path / f"{name}.pub")
    return made


def listed(network: NetworkFolder) -> list[tuple[int, str, bool]]:
    clients = json.loads(command(network, "list", "--json"))["clients"]
    return [(client["number"], client["name"], client["removed"]) for client in clients]


def test_a_number_is_never_given_to_another_client(network: NetworkFolder, tmp_path: Path) -> None:
    make_client_key(tmp_path / "carol")
    command(network, "remove", "1")
    assert listed(network) == [(0, "alice", False), (1, "bob", True)]
    assert network.admit(tmp_path / "carol.pub") == 2
    assert network.admit(tmp_path / "bob.pub") == 1
    assert listed(network) == [(0, "alice", False), (1, "bob", False), (2, "carol", False)]
    with pytest.raises(ConfigError, match=r"client 7: no such client is admitted; there are 0, 1, 2"):
        command(network, "remove", "7")


def test_a_new_key_has_the_number_of_the_old_one(network: NetworkFolder, tmp_path: Path) -> None:
    make_client_key(tmp_path / "bob-2")
    with pytest.raises(ConfigError, match="a key of client 0"):
        command(network, "rotate", "1", str(tmp_path / "alice.pub"))
    command(network, "rotate", "1", str(tmp_path / "bob-2.pub"))
    assert listed(network) == [(0, "alice", False), (1, "bob-2", False)]
    (tmp_path / "again").mkdir()
    make_client_key(tmp_path / "again" / "bob")
    command(network, "rotate", "1", str(tmp_path / "again" / "bob.pub"))
    for earlier in ("bob", "bob-2"):
        with pytest.raises(ConfigError, match="an earlier key of client 1, which has another one now"):
            network.admit(tmp_path / f"{earlier}.pub")
    make_client_key(tmp_path / "bob-3")
    command(network, "rotate", "1", str(tmp_path / "bob-3.pub"))
    assert [number for number, _ in network.removed()] == [1, 1, 1]
    output = subprocess.run(["ssh-keygen", "-lf", str(tmp_path / "bob-3.pub")], capture_output=True, text=True).stdout
    assert not output or output.split()[1] in command(network, "list")


def test_the_end_of_a_certificate_is_announced_a_month_before_and_refused_afterwards(network: NetworkFolder) -> None:
    end = datetime.now(UTC).timestamp() + 365 * DAY
    assert server_expiry(network, end - 31 * DAY) == []
    (line,) = server_expiry(network, end - 29 * DAY)
    assert "in 29 days: fedveil net renew makes a new one" in line
    with pytest.raises(ConfigError, match=r"server.pem ended on .*: fedveil net renew"):
        server_expiry(network, end + DAY)
    with pytest.raises(ConfigError, match=r"ca.pem ended on .* and no client connects with it: ask"):
        expiry(network.authority, "ask", end + 3650 * DAY)


def test_a_server_with_an_ended_certificate_is_refused_until_it_is_renewed(network: NetworkFolder, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    renew(network, days=0)
    (tmp_path / "c.toml").write_text(
        "method = { name = 'dp-fedavg' }\ndata = { name = 'digits', partition = { kind = 'iid', clients = 2 } }\n"
        "model = { name = 'linear' }\nprivacy = { epsilon = 4.0, delta = 1e-2, view = 'server' }\n"
    )
    words = ["serve", str(tmp_path / "c.toml"), "--dir", str(network.path), "--out", str(tmp_path / "run")]
    begin = time.monotonic()
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, ConfigError)
    assert "fedveil net renew" in str(done.exception)
    assert time.monotonic() - begin < 30
    authority = network.authority.read_bytes()
    command(network, "renew", "--days", "20")
    assert "in 20 days" in " ".join(server_expiry(open_network(network.path)))
    assert network.authority.read_bytes() == authority
    command(network, "renew", "--authority")
    assert network.authority.read_bytes() != authority
    assert server_expiry(network) == []


def test_an_ended_certificate_is_explained_to_a_client(tmp_path: Path) -> None:
    line = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1006)"
    joining = Joining("fl.example.org:9700", tmp_path / "ca.pem", tmp_path / "key", tmp_path / "state")
    assert "has ended, or this machine's clock is wrong" in advice(line, joining)


@pytest.mark.heavy
@pytest.mark.filterwarnings("default")
def test_a_server_that_runs_turns_away_a_removed_client_and_uses_a_renewed_certificate(
    network: NetworkFolder, tmp_path: Path
) -> None:
    pytest.importorskip("flwr")
    from fedveil.deploy.flower_api import FLEET_ROUTES
    from fedveil.deploy.superlink import told_at

    at, route = Path("/tmp") / f"fedveil-test-{network.port}", sorted(FLEET_ROUTES)[0]
    words = ["--network", str(network.path), "--port", str(network.port), "--socket", str(at), "--answer-bytes", "1000"]
    process = subprocess.Popen([sys.executable, "-m", "fedveil.deploy.superlink", *words])

    def status(name: str) -> bytes:
        return asked(network.port, request(route, signed(tmp_path / name)))[9:12]

    def until(reached: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not reached():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.2)

    try:
        until(lambda: status("bob") not in (b"", b"404"))
        command(network, "remove", "1")
        until(lambda: status("bob") == b"404")
        assert status("alice") != b"404"
        assert "client 1 is removed" in told_at(at).read_text()
        before = ssl.get_server_certificate(("127.0.0.1", network.port))
        command(network, "renew")
        until(lambda: ssl.get_server_certificate(("127.0.0.1", network.port)) != before)
        renew(network, days=0)
        until(lambda: "has ended, and no client connects: fedveil net renew" in told_at(at).read_text())
    finally:
        process.terminate()
        process.wait(30)
        at.unlink(missing_ok=True)
        told_at(at).unlink(missing_ok=True)


def test_when_a_client_was_seen_is_kept_over_restarts(network: NetworkFolder) -> None:
    now = [1.8e9]
    seen = SeenClients(network, {0: "0.3.0"}, lambda: now[0])
    seen.note([0, 1])
    now[0] += 30
    seen.note([0])
    assert "alice" in command(network, "list")
    now[0] += DAY
    SeenClients(network, {}, lambda: now[0]).note([0])
    clients = json.loads(command(network, "list", "--json"))["clients"]
    assert [client["seen"] for client in clients] == ["2027-01-16 08:00 UTC", "2027-01-15 08:00 UTC"]
    assert [client["fedveil"] for client in clients] == ["0.3.0", ""]


def test_a_consent_ends_after_its_last_day() -> None:
    agreed = consent(0, until="2027-06-30")
    require_not_ended(agreed, datetime(2027, 6, 30, 23, 59, tzinfo=UTC))
    with pytest.raises(ConsentRefused, match=r"this client's consent ended on 2027-06-30 \(until in its consent.toml\)"):
        require_not_ended(agreed, datetime(2027, 7, 1, tzinfo=UTC))


def test_one_whose_consent_ends_during_a_run_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    there = machines(tmp_path / "clients")
    yesterday = (datetime.now(UTC) - timedelta(days=1)).date()

    def after(row: Any) -> None:
        there.consents[1] = consent(1, until=yesterday)

    result, _ = served(small(), tmp_path / "server", there, on_round=after)
    assert [row["participants"] for row in result.history] == [3, 2]
    assert result.history[1]["failures"] == {
        1: f"refused: this client's consent ended on {yesterday} (until in its consent.toml)"
    }


TOML = """seeded_noise = true
least_noise = {noise}
[data]
part = 0
[lifetime.server]
epsilon = 8.001
delta = 0.01
"""


def test_a_consent_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    path, lines, offer = tmp_path / "consent.toml", list[str](), offer_of("r", 0, small())
    path.write_text(TOML.format(noise=99.0))
    file = ConsentFile(path)
    client = JoinedClient(tmp_path / "client", file.read(), lines.append)

    def reason() -> str:
        if (changed := file.changed()) is not None:
            client.change_consent(changed)
        return read_consent(client.answer([offer_bytes(offer)]), offer)

    assert "this client asks for 99" in reason()
    path.write_text(TOML.format(noise="lots"))
    assert "cannot be read at the moment" in reason()
    path.write_text(TOML.format(noise=0.1))
    assert reason() == ""
    assert reason() == ""
    path.unlink()
    assert "cannot be read at the moment" in reason()
    assert sum("cannot be read, and everything is refused" in line for line in lines) == 2


def test_both_sides_are_upgraded_between_two_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, configuration = machines(tmp_path / "clients"), small(training={"rounds": 3})

    def stop(row: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        served(configuration, tmp_path / "server", there, on_round=stop)
    there.consents[2] = consent(2)
    for module in ("offers", "join"):
        monkeypatch.setattr(f"fedveil.deploy.{module}.__version__", "99.1")
    with pytest.MonkeyPatch.context() as earlier:  # one machine is not upgraded yet, and says so
        earlier.setattr("fedveil.deploy.join.__version__", "99.0")
        offer = offer_of("other", 0, configuration)
        offer = type(offer)(offer.run, offer.client, offer.config, fedveil="99.1")
        said = read_consent(JoinedClient(tmp_path / "late", consent(0)).answer([offer_bytes(offer)]), offer)
    assert said == "the server has fedveil 99.1, and this client 99.0: install the same version on both sides"
    result, _ = served(configuration, tmp_path / "server", there, resume=True)
    assert [row["participants"] for row in result.history] == [3, 3, 3]
    assert result.model.vector.equal(run(configuration, tmp_path / "inline").model.vector)
    recorded = json.loads(next((tmp_path / "clients/0/runs").glob("*/offer.json")).read_text())
    assert recorded["fedveil"] != "99.1"  # the version at consent
