"""The demonstration's clients agree to what is configured, and what several machines cannot do is refused at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from federation_runs import config
from fedveil.cli.app import app
from fedveil.deploy.consent import Consent
from fedveil.deploy.demo_network import BESIDE, consent_to, demo
from fedveil.deploy.deployed_data import public_part
from fedveil.deploy.join import JoinedClient
from fedveil.deploy.offers import offer_bytes, offer_of, read_consent
from fedveil.errors import ConfigError, LedgerError
from fedveil.experiment.resolve import resolve
from fedveil.experiment.run import run
from fedveil.experiment.run_directory import write_config
from fedveil.experiment.two_ledgers import compared
from fedveil.experiment.verification import verification
from fedveil.ledger.files import head_path, head_record
from fedveil.ledger.ledger import Ledger
from joined_clients import SIZES, Machines, Nobody, configuration, consent, files, served

DP_SGD = {"training": {"local": "dp-sgd", "example_clip": 1.0, "batch_clip": None}, "privacy": {"unit": "record", "delta": 1e-5}}
SAMPLED: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "dp-sgd": ({"name": "dp-fedavg"}, "server", DP_SGD),
    "dp-sgd, summed": ({"name": "dp-fedavg"}, "aggregate", DP_SGD),
    "poisson": ({"name": "dp-fedavg"}, "aggregate", {"training": {"sampling": "poisson"}}),
    "poisson, the last model": ({"name": "dp-fedavg"}, "final", {"training": {"sampling": "poisson"}}),
    "mixed": ({"name": "time-adaptive"}, "aggregate", {"training": {"sampling": "poisson"}}),
}


def agreed(wanted: Any, folder: Path) -> Machines:
    """Clients of the demonstration."""
    clients = range(wanted.data.partition.get("clients") or len(SIZES))
    return Machines(folder, {number: Consent.model_validate(consent_to(wanted, number)) for number in clients})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("dp-sgd", "poisson"))) for name in SAMPLED]
)
def test_runs_with_secret_samples_are_agreed_to_and_both_ledgers_agree(name: str, tmp_path: Path) -> None:
    """The consent had no order, so that each of them was refused."""
    method, view, more = SAMPLED[name]
    wanted = config(method, view, **more)
    result, lines = served(wanted, tmp_path / "run", agreed(wanted, tmp_path / "clients"))
    assert lines == []
    assert result.model.vector.equal(run(wanted, tmp_path / "inline").model.vector)
    assert verification(tmp_path / "run").outcome == "verified"
    for number in range(6):
        if any((tmp_path / "clients" / str(number)).glob("runs/*")):
            assert {found.kind for found in compared(tmp_path / "run", tmp_path / "clients" / str(number))} == {"verified"}


def test_a_table_of_ones_own_is_divided_among_the_clients(tmp_path: Path) -> None:
    files(tmp_path)
    wanted = configuration(tmp_path, "together.csv")
    inline = run(wanted, tmp_path / "inline")
    result, lines = served(wanted, tmp_path / "run", agreed(wanted, tmp_path / "clients"))
    assert lines == []
    assert result.model.vector.equal(inline.model.vector)


@pytest.mark.slow
def test_features_are_made_on_both_sides(tmp_path: Path) -> None:
    """The server tested on the raw examples."""
    wanted = config({"name": "dp-fedavg"}, "server", data={"features": "oriented-gradients"})
    result, lines = served(wanted, tmp_path / "run", agreed(wanted, tmp_path / "clients"))
    assert lines == []
    inline = run(wanted, tmp_path / "inline")
    assert result.model.vector.equal(inline.model.vector)
    assert result.history[-1]["test_accuracy"] == inline.history[-1]["test_accuracy"]


LOST: dict[str, Any] = {"privacy": {"budget": "none.sqlite"}, "run": {"seeded_noise": False}}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "nothing is proven": ({"name": "fedavg", "weighting": "uniform"}, {}, r"set privacy\.epsilon"),
    "a published variant": ({"name": "aldp-fl", "variant": "published"}, {"privacy": {"view": "server"}}, r"method\.variant"),
    "weights": ({"name": "fedavg", "weighting": "examples"}, {}, r"method\.weighting"),
    "public examples": ({"name": "dp-fedavg"}, {"data": {"public_fraction": 0.1}}, r"data\.public_fraction"),
    "no budget": ({"name": "dp-fedavg"}, LOST, r"privacy\.budget = '.*none\.sqlite': there is no budget"),
    "a budget that counts people": ({"name": "dp-fedavg"}, {"privacy": {"budget": "none.sqlite"}}, r"run\.seeded_noise"),
    "too few clients": ({"name": "dp-fedavg"}, {"training": {"clients_per_round": 7}}, r"training\.clients_per_round = 7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_several_machines_cannot_do_is_refused_before_a_process_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, more, said = REFUSED[name]
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises((ConfigError, LedgerError), match=said):
        demo(config(method, **more), tmp_path / "out", print)
    assert not (tmp_path / "out").exists()


def test_fewer_clients_than_a_round_has_are_refused_in_a_line(tmp_path: Path) -> None:
    write_config(tmp_path / "c.toml", config({"name": "dp-fedavg"}, "server").resolved())
    done = CliRunner().invoke(app, ["net", "demo", str(tmp_path / "c.toml"), "--clients", "3", "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, ConfigError)
    assert "training.clients_per_round = 4 is more than the 3 clients" in str(done.exception)


def test_a_try_without_a_release_does_not_block_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(configured: Any, serving: Any) -> Any:
        return served(configured, serving.out, Machines(tmp_path / "clients", {}))

    monkeypatch.setattr("fedveil.deploy.demo_network.serve", failing)
    for _ in range(2):
        with pytest.raises(Nobody):
            demo(config({"name": "dp-fedavg"}, "server"), tmp_path / "out", print)
        assert not (tmp_path / "out").exists()


def waiting(config: str, out: str) -> None:
    """A demonstration whose server has begun its run, and waits for ever: what a program of its own runs, to be killed."""
    import fedveil.deploy.demo_network as network
    from fedveil.experiment.config_files import read_config
    from fedveil.experiment.run import train

    def serve(configured: Any, serving: Any) -> Any:
        serving.on_up()
        train(resolve(configured), public_part(resolve(configured)), serving.out, clients=lambda run: lambda job: time.sleep(600))

    network.serve = serve
    network.demo(read_config(Path(config)), Path(out), print)


def client_processes(folder: Path) -> list[int]:
    """Those whose files lie there, but none that has ended and was not waited for."""
    found = subprocess.run(["ps", "-wweo", "pid,stat,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split(maxsplit=2) for line in found if str(folder) in line and "fedveil join" in line]
    return [int(pid) for pid, state, _ in rows if not state.startswith("Z")]


def comes(true: Callable[[], Any], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.1)
    return bool(true())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere clients do not hear that their parent was killed")
def test_a_demonstration_that_is_killed_takes_its_clients_with_it_and_does_not_block_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"data": {"partition": {"kind": "iid", "clients": 2}}, "training": {"clients_per_round": 2, "local_steps": 1}}
    wanted, out = config({"name": "dp-fedavg"}, "server", **few), tmp_path / "out"
    write_config(tmp_path / "c.toml", wanted.resolved())
    code = "import sys; from test_demo_network import waiting; waiting(*sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "c.toml"), str(out)], env=environment) as killed:
        begun = comes(lambda: (out / "ledger.sqlite").exists() and client_processes(tmp_path), 60)
        killed.send_signal(signal.SIGKILL)
    assert begun
    try:
        assert comes(lambda: not client_processes(tmp_path), 20)
    finally:
        for pid in client_processes(tmp_path):
            os.kill(pid, signal.SIGKILL)
    folder = out.with_name(out.name + BESIDE)
    assert (folder / "client-0" / "key-0").is_file()
    with Ledger.open(out / "ledger.sqlite", read_only=True) as ledger:
        assert len(ledger) == 0
    monkeypatch.setattr("fedveil.deploy.demo_network.serve", agreeing(tmp_path))
    demo(wanted, out, print)
    assert verification(out).outcome == "verified"
    assert not folder.exists()


def agreeing(folder: Path) -> Any:
    """In the place of `serve`: the run with clients in this process."""
    return lambda configured, serving: served(configured, serving.out, agreed(configured, folder / "clients"))[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("head", ["raised", "not yet"])
def test_a_run_that_charged_stays_when_a_demonstration_was_killed_there(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, out = config({"name": "dp-fedavg"}, "server"), tmp_path / "out"
    monkeypatch.setattr("fedveil.deploy.demo_network.serve", agreeing(tmp_path))
    demo(wanted, out, print)
    (out / "summary.json").unlink()
    if head == "not yet":
        head_path(out / "ledger.sqlite").write_bytes(head_record(0))
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    folder = out.with_name(out.name + BESIDE)
    (folder / "client-0").mkdir(parents=True)
    (folder / "client-0" / "key").write_text("of a demonstration that was killed")
    with pytest.raises(ConfigError, match=f"exists and is not empty.*--resume {out}"):
        demo(wanted, out, print)
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    assert not folder.exists()


def test_two_demonstrations_at_one_place_do_not_remove_each_others_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, out = config({"name": "dp-fedavg"}, "server"), tmp_path / "out"

    def second(configured: Any, serving: Any) -> Any:
        there = sorted(serving.network.path.parent.iterdir())
        with pytest.raises(ConfigError, match="another run is at work"):
            demo(wanted, out, print)
        assert sorted(serving.network.path.parent.iterdir()) == there
        raise KeyboardInterrupt

    monkeypatch.setattr("fedveil.deploy.demo_network.serve", second)
    with pytest.raises(KeyboardInterrupt):
        demo(wanted, out, print)
    assert [*tmp_path.iterdir()] == []


def test_a_refusal_that_no_order_would_avoid_says_so(tmp_path: Path) -> None:
    """A cap for secret samples refused a run of everybody that costs exactly the cap, and did not say why."""
    wanted = config({"name": "dp-fedavg"}, "aggregate")
    offer = offer_of("r", 0, wanted)
    whole = consent_to(wanted, 0)
    ordered = {**whole, "lifetime": {"aggregate": {**whole["lifetime"]["aggregate"], "order": 12}}}
    first = JoinedClient(tmp_path / "client", Consent.model_validate(ordered)).answer([offer_bytes(offer)])
    assert "Its consent sets lifetime.aggregate.order" in read_consent(first, offer)
    second = JoinedClient(tmp_path / "client", Consent.model_validate(whole))
    assert read_consent(second.answer([offer_bytes(offer)]), offer) == ""


def test_a_refusal_for_want_of_an_order_names_it_and_the_mended_consent_is_taken(tmp_path: Path) -> None:
    """The first refusal made the lifetime's ledger, and no other number could be given afterwards."""
    wanted = config({"name": "dp-fedavg"}, "aggregate", training={"sampling": "poisson"})
    offer = offer_of("r", 0, wanted)
    whole = consent_to(wanted, 0)
    own = whole["lifetime"]["aggregate"]
    short = {**whole, "lifetime": {"aggregate": {key: own[key] for key in ("epsilon", "delta")}}}
    first = JoinedClient(tmp_path / "client", Consent.model_validate(short)).answer([offer_bytes(offer)])
    assert f"lifetime.aggregate.order = {own['order']:g}" in read_consent(first, offer)
    second = JoinedClient(tmp_path / "client", Consent.model_validate(whole))
    assert read_consent(second.answer([offer_bytes(offer)]), offer) == ""
    third = JoinedClient(tmp_path / "client", Consent.model_validate(short))
    assert "this client's own record" in read_consent(third.answer([offer_bytes(offer)]), offer)


def test_a_cap_in_gaussian_dp_says_nothing_of_an_order_where_nothing_is_sampled(tmp_path: Path) -> None:
    offer = offer_of("r", 0, config({"name": "dp-fedavg"}, "server", privacy={"epsilon": 8.0}))
    small = consent(0, lifetime={"server": {"epsilon": 8.0001, "delta": 0.01}})
    client = JoinedClient(tmp_path / "client", small)
    assert read_consent(client.answer([offer_bytes(offer)]), offer) == ""
    other = offer_of("s", 0, config({"name": "dp-fedavg"}, "server", privacy={"epsilon": 8.0}))
    assert "order" not in read_consent(client.answer([offer_bytes(other)]), other)
