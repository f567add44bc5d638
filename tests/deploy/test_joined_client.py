"""Consent, the client's ledgers, and what a client refuses; runs over joined clients equal inline to the bit."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from federation_runs import bits
from fedveil import __version__
from fedveil.accounting.types import View
from fedveil.cli.app import app
from fedveil.deploy.client_ledger import TRUSTS
from fedveil.deploy.consent import Consent, check_offer, read_consent_file
from fedveil.deploy.grid_engine import GONE
from fedveil.deploy.join import JoinedClient, Joining, _alone, advice, join
from fedveil.deploy.offers import (
    AGAIN,
    ConsentingClients,
    Offer,
    consent_bytes,
    offer_bytes,
    offer_of,
    read_consent,
    read_offer,
    refusal_bytes,
)
from fedveil.deploy.round_messages import (
    RefusalMessage,
    ReleaseMessage,
    RoundMessage,
    TaskMessage,
    read_reply,
    read_round,
    read_task,
    round_bytes,
    task_bytes,
)
from fedveil.deploy.wire_format import Kind, WireError, decoded, encoded
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config_files import read_config
from fedveil.experiment.run import run
from fedveil.experiment.run_directory import write_config
from fedveil.experiment.shared_budget import planned_charges
from fedveil.ledger.files import owner_only_folder
from fedveil.ledger.ledger import Ledger
from fedveil.mechanism.plan import Released
from fedveil.papers.fedanc.method import FedANC
from full_disk import NoRoomForStates
from joined_clients import Nobody, configuration, consent, files, machines, rows, served, small
from kill_points import kill_at


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("view", "method"),
    [
        ("server", {"name": "dp-fedavg"}),
        ("aggregate", {"name": "dp-fedavg"}),
        ("server", {"name": "fedglp-adp", "variant": "proven"}),
    ],
)
def test_a_deployed_run_equals_inline_and_both_sides_have_charged_it(view: str, method: dict[str, Any], tmp_path: Path) -> None:
    there = machines(tmp_path / "clients")
    result, lines = served(small(view, method), tmp_path / "server", there)
    inline = run(small(view, method), tmp_path / "inline")
    assert bits(result.model.vector) == bits(inline.model.vector)
    assert lines == []
    server = rows(tmp_path / "server/ledger.sqlite")
    assert [e.event for e in server] == [e.event for e in rows(tmp_path / "inline/ledger.sqlite")]
    for number in range(3):
        own = tmp_path / "clients" / str(number)
        run_name = json.loads((own / next((own / "runs").iterdir()).relative_to(own) / "offer.json").read_text())["run"]
        lifetime = rows(own / f"lifetime-{view}.sqlite")
        if view == "server":
            mine = [e for e in server if e.client == number]
            assert rows(own / "runs" / run_name / "ledger.sqlite") == mine
            assert [(e.client, e.event) for e in lifetime] == [(0, e.event) for e in mine]
        else:
            assert rows(own / "runs" / run_name / "ledger.sqlite") == []
            assert [(e.client, e.note, e.event.count) for e in lifetime] == [(-1, TRUSTS, 2)]
        assert {e.run for e in lifetime} == {run_name}
        assert (own.stat().st_mode & 0o777) == 0o700


def test_noise_is_secret_unless_the_consent_says_otherwise(tmp_path: Path) -> None:
    there = machines(tmp_path / "clients", seeded_noise=False)
    with pytest.raises(Nobody):
        served(small(), tmp_path / "server", there)
    nothing_charged(tmp_path / "clients")
    one, _ = served(small(run={"seeded_noise": False}), tmp_path / "a", machines(tmp_path / "ca", seeded_noise=False))
    two, _ = served(small(run={"seeded_noise": False}), tmp_path / "b", machines(tmp_path / "cb", seeded_noise=False))
    assert bits(one.model.vector) != bits(two.model.vector)


def nothing_charged(folder: Path) -> None:
    assert [row for path in folder.rglob("*.sqlite") for row in rows(path)] == []
    assert list(folder.rglob("offer.json")) == []


def edited(**sections: Any) -> Callable[[dict[str, Any]], None]:
    def edit(raw: dict[str, Any]) -> None:
        for section, values in sections.items():
            raw[section] = {**raw[section], **values}

    return edit


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], dict[str, Any], str]] = {
    "epsilon": (edited(privacy={"epsilon": 1e6}), {}, "lifetime is epsilon = 8.001 at delta = 0.01"),
    "no noise": (lambda raw: raw.update(offer_of("r", 1, small(method={"name": "fedavg"})).config), {}, "nothing is proven"),
    "view": (edited(privacy={"view": "aggregate"}), {"lifetime": {"server": {"epsilon": 9, "delta": 0.01}}}, "in server only"),
    "final view": (edited(privacy={"view": "final"}), {}, "privacy.view = 'final'"),
    "unit": (edited(), {"unit": "record"}, "caps of record level, zero-out, server view"),
    "adjacency": (edited(privacy={"adjacency": "replace_one"}), {}, "the run's guarantee is for"),
    "seeded": (edited(), {"seeded_noise": False}, "the server could compute the noise"),
    "weak noise": (edited(), {"least_noise": 50.0}, "this client asks for 50"),
    "large delta": (edited(privacy={"delta": 0.3, "allow_vacuous_delta": True}), {}, "more privacy than this client"),
    "plugins": (edited(run={"plugins": ["os"]}), {}, "does not run code named by a server"),
    "file as plugin": (edited(run={"plugins": ["/etc/passwd.py"]}), {}, "does not run code named by a server"),
    "unknown method": (edited(method={"name": "steal"}, run={"plugins": ["x"]}), {}, "does not run code named by a server"),
    "own model": (edited(model={"name": "os.path:join", "hidden": None}), {}, "does not run code named"),
    "handed over": (edited(data={"handed_over": ["data"]}), {}, "has its own"),
    "other part": (edited(), {"data": {"part": 2}}, "has part 2 of the data, not part 1"),
    "a huge model": (edited(model={"hidden": [10**6, 1]}), {"least_noise": 0.01}, "limits.parameters is 25,000,000"),
    "a huge width": (edited(model={"hidden": [10**9]}), {}, "model.hidden is 1,000,000,000, and limits.parameters"),
    "rounds without end": (edited(training={"rounds": 10**6}), {"least_noise": 0.01}, "limits.rounds is 10,000"),
    "steps without end": (edited(training={"local_steps": 10**12}), {}, "training.local_steps is 1,000,000,000,000"),
    "epochs without end": (edited(training={"local_steps": None, "local_epochs": 10**6}), {}, "limits.steps is 100,000"),
    "clients without end": (lambda raw: raw["data"]["partition"].update(clients=10**9), {}, "limits.clients is"),
    "a method's steps": (
        lambda raw: raw.update(offer_of("r", 1, small(method={"name": "fedanc", "pretraining_steps": 10**9})).config),
        {},
        "method.pretraining_steps is 1,000,000,000, and limits.steps is 100,000",
    ),
    "a layer too many": (edited(model={"name": "vit-small", "hidden": None}), {}, "cannot be accepted"),
    "an own limit": (edited(), {"limits": {"parameters": 600}}, "number of parameters is 610, and limits.parameters is 600"),
    "no time": (edited(), {"limits": {"seconds": 1e-9}, "least_noise": 0.01}, "judging the run takes longer than limits.seconds"),
    "too many rounds": (edited(training={"rounds": 0}), {}, "cannot be accepted"),
    "unknown key": (edited(privacy={"trust": 1}), {}, "cannot be accepted"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_goes_beyond_the_consent_is_refused_with_its_reason_and_costs_nothing(name: str, tmp_path: Path) -> None:
    edit, changes, said = REFUSED[name]
    offer = offer_of("r", 1, small())
    edit(offer.config)
    client = JoinedClient(tmp_path / "client", consent(**{"part": 1} if "data" not in changes else {"part": 0}, **changes))
    try:
        reason = read_consent(client.answer([offer_bytes(offer)]), offer)
    except WireError as problem:
        reason = str(problem)
    assert reason
    assert re.search(said, reason), reason
    nothing_charged(tmp_path / "client")


@pytest.mark.parametrize(
    "gone", ["method.clip", "model.activation", "training.batch_size", "privacy.grid_bits", "data.partition.examples_per_client"]
)
def test_an_offer_that_leaves_something_to_the_clients_defaults_is_refused(gone: str, tmp_path: Path) -> None:
    """So a server of another version, which does not know a key, trains nobody by a default that it never saw."""
    offer = offer_of("r", 0, small())
    offer.parsed()
    *sections, key = gone.split(".")
    section = offer.config
    for name in sections:
        section = section[name]
    del section[key]
    reason = read_consent(JoinedClient(tmp_path / "client", consent(0)).answer([offer_bytes(offer)]), offer)
    assert f"does not give {gone} as this client's fedveil would: install the same" in reason
    nothing_charged(tmp_path / "client")


def test_a_client_with_other_defaults_trains_what_was_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = small(method={"name": "fedanc", "pretraining_steps": 20})
    message = offer_bytes(offer_of("r", 0, asked))
    certified = certify_config(asked).proven
    monkeypatch.setattr(FedANC, "proven_defaults", {"gamma_min": 0.5})
    assert small(method={"name": "fedanc", "pretraining_steps": 20}).method.gamma_min == 0.5
    client = JoinedClient(tmp_path, consent(0))
    offer = read_offer(message)
    assert client.consented(offer) == certified.epsilon
    trained = client._node(TaskMessage("r", 0, 0, 1.0)).context.policy.part.method
    assert (trained.gamma_min, check_offer(consent(0), offer.parsed()).method.gamma_min) == (0.8, 0.8)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [{"name": "dp-fedavg"}, {"name": "fedanc", "pretraining_steps": 20}])
def test_a_server_that_resumes_offers_the_same(method: dict[str, Any], tmp_path: Path) -> None:
    """Its configuration is the one in the run directory then; another digest would be a configuration that changed."""
    asked = small(method=method)
    write_config(tmp_path / "config.toml", asked.resolved())
    assert offer_of("r", 0, read_config(tmp_path / "config.toml")).digest == offer_of("r", 0, asked).digest


def test_what_a_few_bytes_of_an_offer_can_ask_for_costs_no_memory_and_no_time(tmp_path: Path) -> None:
    """A billion parameters with `least_noise` took 3.8 GB, and a million rounds 23 s, before anything was refused."""
    tracemalloc.start()
    try:
        for edit in (edited(model={"hidden": [10**5, 10**4]}), edited(training={"rounds": 10**9})):
            offer = offer_of("r", 0, small())
            edit(offer.config)
            client = JoinedClient(tmp_path / "client", consent(0, least_noise=0.01))
            assert "this client's consent" in read_consent(client.answer([offer_bytes(offer)]), offer)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


def test_the_largest_model_that_is_allowed_is_judged_without_a_vector_of_its_length(tmp_path: Path) -> None:
    asked = small(model={"name": "mlp", "hidden": [300_000]}, training={"rounds": 3})
    tracemalloc.start()
    try:
        check_offer(consent(0, least_noise=0.01), asked)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


def test_an_offer_or_a_round_beyond_all_need_is_refused_before_it_is_read(tmp_path: Path) -> None:
    client = JoinedClient(tmp_path / "client", consent(0, limits={"parameters": 1000}))
    with pytest.raises(WireError, match="an offer has at most 1048576 bytes, this one has 1048577"):
        client.answer([b"x" * (2**20 + 1)])
    with pytest.raises(WireError, match=r"at most 8452608 bytes at this client \(limits.parameters\), this one has 8452609"):
        client.answer([b"x" * 8_452_600, b"x" * 9])


@pytest.mark.few(5)
@pytest.mark.parametrize("view", ["server", "aggregate"])
@pytest.mark.parametrize("kind", ["offer", "consent", "refusal", "task", "round"])
def test_a_message_with_anything_beyond_its_fields_is_refused(kind: str, view: str, tmp_path: Path) -> None:
    offer = offer_of("r", 0, small(view))
    told, task = (
        round_bytes(RoundMessage("r", Released(0, torch.zeros(610), None), {}, None)),
        task_bytes(TaskMessage("r", 0, 0, 1.0)),
    )
    contents = {"offer": offer_bytes(offer), "consent": consent_bytes(offer, 1.5), "refusal": refusal_bytes(offer, "no")}
    content = (contents | {"round": told, "task": task})[kind]
    message = decoded(content, *Kind)
    read: dict[str, Callable[[bytes], Any]] = {
        "offer": read_offer,
        "consent": lambda content: read_consent(content, offer),
        "refusal": lambda content: read_consent(content, offer),
        "round": lambda content: read_round(content, 610),
        "task": read_task,
    }
    read[kind](encoded(message))
    more = encoded(replace(message, fields={**message.fields, "note": 1}))
    array = encoded(replace(message, arrays={**message.arrays, "note": np.zeros(1)}))
    fewer = encoded(replace(message, fields=dict(list(message.fields.items())[:-1])))
    for wrong in (more, array, fewer):
        with pytest.raises(WireError):
            read[kind](wrong)


@pytest.mark.parametrize("epsilon", ["1.5", None, True, math.nan, math.inf, -1.0])
def test_a_consent_names_a_finite_epsilon(epsilon: Any) -> None:
    offer = offer_of("r", 0, small())
    with pytest.raises(WireError, match="epsilon is no finite number"):
        read_consent(consent_bytes(offer, epsilon), offer)


STRICTER: dict[str, tuple[dict[str, Any], str]] = {
    "epsilon": (
        {"lifetime": {"server": {"epsilon": 1.0, "delta": 0.01}}},
        "this client's lifetime is epsilon = 1 at delta = 0.01",
    ),
    "least noise": ({"least_noise": 99.0}, "the noise multiplier is .* this client asks for 99"),
    "seeded noise": ({"seeded_noise": False}, "run.seeded_noise = true: the server could compute the noise"),
    "view": ({"lifetime": {"aggregate": {"epsilon": 9.0, "delta": 0.01}}}, "takes part in aggregate only"),
    "unit": ({"unit": "record"}, "this client's caps of record level"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", STRICTER)
def test_one_that_refuses_is_named_and_the_others_go_on(name: str, tmp_path: Path) -> None:
    changes, said = STRICTER[name]
    there = machines(tmp_path / "clients")
    there.consents[1] = consent(1, **changes)
    result, lines = served(small(), tmp_path / "server", there)
    assert [row["participants"] for row in result.history] == [2, 2]
    assert lines == [f"client 1 refused to take part: {result.history[0]['failures'][1].split(': ', 1)[1]}"]
    assert re.search(said, lines[0])
    nothing_charged(tmp_path / "clients/1")


SPENT = (
    "the run costs more privacy than this client's consent still allows ([lifetime] in its consent.toml); its log says how much"
)
"""What the server learns of a lifetime that is spent: neither what is left, nor by which runs, nor where it is recorded."""


def test_one_whose_lifetime_is_spent_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    there = machines(tmp_path / "clients")
    for number in (0, 2):
        there.consents[number] = consent(number, lifetime={"server": {"epsilon": 30.0, "delta": 0.01}})
    served(small(), tmp_path / "one", there)
    before = {path: rows(path) for path in (tmp_path / "clients/1").rglob("*.sqlite")}
    result, lines = served(small(), tmp_path / "two", there)
    assert [row["participants"] for row in result.history] == [2, 2]
    assert len(lines) == 1
    assert lines[0] == f"client 1 refused to take part: {SPENT}"
    assert sum("refused: privacy.budget = " in line and "is left" in line for line in there.lines) == 1
    assert {path: rows(path) for path in (tmp_path / "clients/1").rglob("*.sqlite")} == before


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "change", [{"privacy": {"epsilon": 7.0}}, {"run": {"plugins": ["/srv/theirs.py"]}}, {"training": {"rounds": 9}}]
)
def test_a_configuration_that_changes_during_the_run_is_refused_and_the_run_goes_on(
    change: dict[str, Any], tmp_path: Path
) -> None:
    there, said = machines(tmp_path / "clients"), []

    def after(row: Any) -> None:
        (name,) = (path.name for path in (tmp_path / "clients/1/runs").iterdir())
        other, before = offer_of(name, 1, small()), everything(tmp_path / "clients/1")
        edited(**change)(other.config)
        said.append(read_consent(there.client(1).answer([offer_bytes(other)]), other))
        assert everything(tmp_path / "clients/1") == before

    result, lines = served(small(), tmp_path / "server", there, on_round=after)
    assert [row["participants"] for row in result.history] == [3, 3]
    assert (len(said), lines) == (2, [])
    assert all("has changed since this client consented to it" in reason for reason in said)


def everything(folder: Path) -> dict[str, bytes]:
    """Each file of a client's folder."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_a_second_run_beyond_the_lifetime_is_refused(view: str, tmp_path: Path) -> None:
    there = machines(tmp_path / "clients")
    served(small(view), tmp_path / "one", there)
    before = {path: rows(path) for path in (tmp_path / "clients").rglob("*.sqlite")}
    with pytest.raises(Nobody):
        served(small(view), tmp_path / "two", there)
    assert sum(SPENT in line for line in there.lines) == 3
    assert {path: rows(path) for path in (tmp_path / "clients").rglob("*.sqlite")} == before


def test_a_configuration_that_changed_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    client = JoinedClient(tmp_path, consent(0))
    offer = offer_of("r", 0, small())
    assert read_consent(client.answer([offer_bytes(offer)]), offer) == ""
    assert read_consent(JoinedClient(tmp_path, consent(0)).answer([offer_bytes(offer)]), offer) == ""
    other = offer_of("r", 0, small(privacy={"epsilon": 7.0}))
    assert "has changed since" in read_consent(JoinedClient(tmp_path, consent(0)).answer([offer_bytes(other)]), other)
    elsewhere = offer_of("r", 2, small())
    assert "has changed since" in read_consent(client.answer([offer_bytes(elsewhere)]), elsewhere)


@pytest.mark.few(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("view", ["server", "aggregate"])
@pytest.mark.parametrize("step", ["fedveil.deploy.join.replace_whole", "fedveil.deploy.client_ledger.ClientLedger.admit"])
def test_a_client_killed_while_it_consents_has_charged_what_it_answers_to(
    step: str, view: str, when: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that one configuration was charged under is free for no other; what was pinned is charged when it comes again."""
    cheap, dear = (offer_of("r", 0, small(view, privacy={"epsilon": epsilon})) for epsilon in (0.1, 7.0))
    path = tmp_path / f"lifetime-{view}.sqlite"

    def kill() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        kill_at(patch, (*step.rsplit(".", 1), when), {1}, kill)
        with pytest.raises(KeyboardInterrupt):
            JoinedClient(tmp_path, consent(0)).consented(cheap)
    first = [row.event for row in rows(path)]
    reason = read_consent(JoinedClient(tmp_path, consent(0)).answer([offer_bytes(dear)]), dear)
    pinned = (tmp_path / "runs/r/offer.json").exists() and Offer(**json.loads((tmp_path / "runs/r/offer.json").read_text()))
    if (step.endswith("replace_whole"), when) == (True, "before"):
        assert (first, reason, pinned) == ([], "", dear)
    else:
        assert "has changed since" in reason
        assert pinned == cheap
        assert read_consent(JoinedClient(tmp_path, consent(0)).answer([offer_bytes(cheap)]), cheap) == ""
    planned = check_offer(consent(0), pinned.parsed())
    charged = [row.event for row in rows(path)]
    assert charged == (planned_charges(planned.method, planned.setting.of(0)) if view == "aggregate" else [])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "left"),
    [({"name": "gfl-aldpa"}, 0), ({"name": "adapldp"}, 1), ({"name": "dp-fedavg"}, 3), ({"name": "ladp-fl"}, 3)],
)
def test_no_release_has_less_noise_than_the_client_asks_for(method: dict[str, Any], left: int, tmp_path: Path) -> None:
    """Plans that are known beforehand are refused with the offer; those that adapt, in the round that has too little."""
    many = small("server", method, training={"rounds": 3}, privacy={"epsilon": None, "noise_multiplier": 2.0, "delta": 1e-3})
    there = machines(tmp_path / "clients", least_noise=2.0, lifetime={"server": {"epsilon": 99.0, "delta": 0.01}})
    with suppress(Nobody):
        served(many, tmp_path / "server", there)
    released = [row for path in tmp_path.glob("clients/0/runs/*/ledger.sqlite") for row in rows(path)]
    assert len(released) == left
    assert all(1 / row.event.mu >= 2.0 * (1 - 1e-6) for row in released)


def test_no_round_of_dp_sgd_costs_more_than_was_charged_at_consent_whatever_state_the_server_sends(tmp_path: Path) -> None:
    """A clip near the end of floats, and noise that was lowered 720,000 times: what left was the sum of the gradients alone."""
    own = {"unit": "record", "lifetime": {"aggregate": {"epsilon": 4.0, "delta": 1e-3}}}
    by_record = {"training": {"local": "dp-sgd", "batch_size": 480}, "privacy": {"unit": "record", "epsilon": 1.0, "delta": 1e-4}}
    run_of_it = small("aggregate", {"name": "adap-dp-fl"}, **by_record)
    client, offer = JoinedClient(tmp_path / "client", consent(0, **own)), offer_of("r", 0, run_of_it)
    assert read_consent(client.answer([offer_bytes(offer)]), offer) == ""
    task, model = TaskMessage("r", 0, 0, 1.0), run(run_of_it, tmp_path / "any").model.vector

    def ask(state: dict[str, Any]) -> Any:
        told = round_bytes(RoundMessage("r", Released(0, model, None), state, None))
        return read_reply(client.answer([told, task_bytes(task)]), task, len(model))

    assert isinstance(ask({"clip": sys.float_info.max, "lowered": 724_736}), RefusalMessage)
    assert isinstance(ask({"clip": 0.5, "lowered": 1}), ReleaseMessage)


def test_more_rounds_than_the_price_assumes_are_refused(tmp_path: Path) -> None:
    """All eight rounds in the place of two that are four apart move what leaves 3.2 times as far."""
    four = {"data": {"partition": {"kind": "iid", "clients": 4}}, "training": {"rounds": 8, "clients_per_round": 1}}
    banded = small("aggregate", {"name": "banded-mf", "separation": 4}, **four)
    client, offer = JoinedClient(tmp_path / "client", consent(0)), offer_of("r", 0, banded)
    assert read_consent(client.answer([offer_bytes(offer)]), offer) == ""
    model = run(banded, tmp_path / "any").model.vector

    def ask(number: int) -> Any:
        told, task = round_bytes(RoundMessage("r", Released(number, model, None), {}, None)), TaskMessage("r", number, 0, 1.0)
        return read_reply(client.answer([told, task_bytes(task)]), task, len(model))

    answers = [ask(number) for number in range(8)]
    assert [isinstance(answer, ReleaseMessage) for answer in answers] == [number in (0, 4) for number in range(8)]
    assert "in at most 2 rounds, at least 4 apart" in answers[1].reason
    assert isinstance(ask(4), ReleaseMessage), "the same request gets the same answer"


def overlapping(patch: pytest.MonkeyPatch, where: str, ask: Callable[[int], Any]) -> list[Any]:
    """What two processes of one client get, of which neither goes on from `where` before the other is there, if it comes."""
    both, real = threading.Barrier(2), resolve_name(where)

    def met(*args: Any, **more: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            both.wait(1.0)
        return real(*args, **more)

    patch.setattr(where, met)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(ask, (0, 1)))


def test_two_processes_of_one_client_answer_each_round_once_where_it_was_charged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two servers that share a run has its own process before it, on the client's one folder."""
    there = [JoinedClient(tmp_path / "client", consent(0)) for _ in range(2)]
    offer, model = offer_of("r", 0, small("aggregate")), run(small("aggregate"), tmp_path / "any").model.vector
    for one in there:
        assert read_consent(one.answer([offer_bytes(offer)]), offer) == ""
    task = TaskMessage("r", 0, 0, 1.0)

    def ask(number: int) -> type:
        told = round_bytes(RoundMessage("r", Released(0, model * (number + 1), None), {}, None))
        return type(read_reply(there[number].answer([told, task_bytes(task)]), task, len(model)))

    kinds = overlapping(monkeypatch, "fedveil.deploy.client_node.client_round", ask)
    assert sorted(kind.__name__ for kind in kinds) == ["RefusalMessage", "ReleaseMessage"]


def test_two_processes_of_one_client_consent_to_one_configuration_of_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [JoinedClient(tmp_path, consent(0)) for _ in range(2)]
    offers = [offer_of("r", 0, small("aggregate", privacy={"epsilon": epsilon})) for epsilon in (0.1, 7.0)]

    def ask(number: int) -> str:
        return read_consent(there[number].answer([offer_bytes(offers[number])]), offers[number])

    reasons = overlapping(monkeypatch, "fedveil.deploy.join.JoinedClient._pin", ask)
    (agreed,) = (offer for offer, reason in zip(offers, reasons, strict=True) if not reason)
    assert Offer(**json.loads((tmp_path / "runs/r/offer.json").read_text())) == agreed
    planned = check_offer(consent(0), agreed.parsed())
    charged = [row.event for row in rows(tmp_path / "lifetime-aggregate.sqlite")]
    assert charged == planned_charges(planned.method, planned.setting.of(0))


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_a_run_that_was_charged_for_an_offer_that_is_gone_is_refused(view: str, tmp_path: Path) -> None:
    """As drafts left it that kept no offers: the lifetime knows the run's name, and not which run it was."""
    there = machines(tmp_path, lifetime={view: {"epsilon": 30.0, "delta": 0.01}})
    cheap, dear = (small(view, privacy={"epsilon": epsilon}) for epsilon in (0.1, 7.0))
    result, _ = served(cheap, tmp_path / "server", there)
    with Ledger.open(result.path / "ledger.sqlite") as ledger:
        run_name = ledger.run
    (tmp_path / "0/runs" / run_name / "offer.json").unlink()
    charged = rows(tmp_path / f"0/lifetime-{view}.sqlite")
    assert charged
    for again in (cheap, dear):
        offer = offer_of(run_name, 0, again)
        reason = read_consent(there.client(0).answer([offer_bytes(offer)]), offer)
        assert "its record of the consent is gone: give the run another name" in reason
    assert rows(tmp_path / f"0/lifetime-{view}.sqlite") == charged
    assert not (tmp_path / "0/runs" / run_name / "offer.json").exists()


def test_rounds_beyond_the_plan_and_of_unknown_runs_are_refused(tmp_path: Path) -> None:
    there = machines(tmp_path / "clients")
    served(small("aggregate"), tmp_path / "server", there)
    more = small("aggregate", training={"rounds": 3})
    (name,) = (path.name for path in (tmp_path / "clients/0/runs").iterdir())
    model = run(more, tmp_path / "any").model.vector
    for number in (2, 1):
        task = TaskMessage(name, number, 0, 1.0)
        parts = [round_bytes(RoundMessage(name, Released(number, model * 2, None), {}, None)), task_bytes(task)]
        reply = read_reply(there.client(0).answer(parts), task, len(model))
        assert isinstance(reply, RefusalMessage)
        assert "has 2 rounds" in reply.reason
    with pytest.raises(WireError, match="has not consented"):
        there.client(0).answer([parts[0], task_bytes(TaskMessage("other", 0, 0, 1.0))])


def test_a_client_that_was_off_joins_later(tmp_path: Path) -> None:
    there = machines(tmp_path / "clients")
    there.off = {2}
    result, _ = served(small(training={"rounds": 3}), tmp_path / "server", there, on_round=lambda row: there.off.clear())
    assert [row["participants"] for row in result.history] == [2, 3, 3]
    assert result.history[0]["failures"] == {2: "it has not joined, or did not answer"}


def test_who_only_looks_is_not_counted_and_may_come_back(tmp_path: Path) -> None:
    """`join --check`: the server goes on waiting, offers the run again, and nothing is charged or remembered of the look."""
    there = machines(tmp_path / "clients")
    there.restarts = False
    looker = JoinedClient(tmp_path / "looker", consent(0), there.lines.append, check=True)
    there._running[0] = looker
    lines: list[str] = []
    asked = ConsentingClients(there, partial(offer_of, "r", config=small()), 3, lines.append)
    waits = 0

    def wait() -> None:
        nonlocal waits
        waits += 1
        assert (asked.consented, asked.refused) == ({1, 2}, {})
        there.off = {0} if waits == 1 else set()
        del there._running[0]
        there.client(0)
        assert waits < 3

    asked.gather({0, 1, 2}, 3, wait)
    assert waits == 2
    assert asked.consented == {0, 1, 2}
    assert looker.has_looked
    assert not (tmp_path / "looker" / "runs").exists()
    assert any("within this client's consent" in line for line in there.lines)
    assert lines == [
        "client 0: this client only looks at what is offered (--check)",
        "clients: 2 consented, 3 needed; 1 only looked",
        "clients: 2 consented, 3 needed",
        "clients: 3 consented, 3 needed",
    ]


def test_who_refuses_is_not_counted_and_is_asked_again_when_back_or_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal counted as a client that was there, and stood until the server was started again."""
    there = machines(tmp_path / "clients")
    willing = dict(there.consents)
    there.consents |= {number: consent(number, unit="record") for number in (1, 2)}
    clock, lines = [0.0], list[str]()
    monkeypatch.setattr("fedveil.deploy.offers.time.monotonic", lambda: clock[0])
    asked, seen = ConsentingClients(there, partial(offer_of, "r", config=small()), 3, lines.append), list[set[int]]()

    def wait() -> None:
        seen.append(set(asked.consented))
        if len(seen) == 1:
            there.off = {1}  # is stopped, and started with another consent
        elif len(seen) == 2:
            there.off, there.consents[1] = set(), willing[1]
        elif len(seen) == 3:
            there.consents[2] = willing[2]
        elif len(seen) == 4:
            clock[0] += AGAIN + 1
        assert len(seen) < 6

    asked.gather({0, 1, 2}, 3, wait)
    assert seen == [{0}, {0}, {0, 1}, {0, 1}]
    assert (asked.consented, asked.refused) == ({0, 1, 2}, {})
    assert [line for line in lines if line.startswith("client 2")] == [line for line in lines if "client 2 refused" in line][:1]
    assert "clients: 1 consented, 3 needed; 2 refused" in lines


def test_a_refusal_is_taken_back_during_the_run(tmp_path: Path) -> None:
    there = machines(tmp_path / "clients")
    there.consents[2], willing = consent(2, unit="record"), there.consents[2]

    def after(row: Any) -> None:
        there.off = {2} if row["round"] == 0 else set()
        there.consents[2] = willing

    result, lines = served(small(training={"rounds": 3}), tmp_path / "server", there, on_round=after)
    assert [row["participants"] for row in result.history] == [2, 2, 3]
    assert sum("client 2 refused to take part" in line for line in lines) == 1


def test_a_client_tells_of_the_same_refusal_once(tmp_path: Path) -> None:
    lines, offer = list[str](), offer_of("r", 0, small())
    client = JoinedClient(tmp_path, consent(0, unit="record"), lines.append)
    for _ in range(2):
        assert "this client's caps" in read_consent(client.answer([offer_bytes(offer)]), offer)
    assert len(lines) == 1


def test_another_version_is_noticed_on_both_sides(tmp_path: Path) -> None:
    """Both sides had the same bundle of an app, whatever their version."""
    lines, offer = list[str](), replace(offer_of("r", 0, small()), fedveil="0.0.1")
    client = JoinedClient(tmp_path, consent(0), lines.append)
    said = f"the server has fedveil 0.0.1, and this client {__version__}: install the same version on both sides"
    assert read_consent(client.answer([offer_bytes(offer)]), offer) == said
    assert lines == [f"run r: refused: {said}"]
    assert offer.digest == offer_of("r", 0, small()).digest


@pytest.mark.parametrize(
    ("changes", "fits"),
    [({}, True), ({"unit": "record"}, False), ({"lifetime": {"server": {"epsilon": 0.1, "delta": 0.01}}}, False)],
)
def test_a_look_says_whether_the_run_fits(changes: Any, fits: bool, tmp_path: Path) -> None:
    client = JoinedClient(tmp_path, consent(0, **changes), check=True)
    client.answer([offer_bytes(offer_of("r", 0, small()))])
    assert (client.has_looked, client.fits) == (True, fits)


def test_a_look_at_data_that_do_not_fit_says_so(tmp_path: Path) -> None:
    files(tmp_path)
    (tmp_path / "1.csv").write_text("a,b,ill\n1,2,7\n")
    for number, fits in ((0, True), (1, False)):
        own = consent(0, data={"file": str(tmp_path / f"{number}.csv"), "columns": ["a", "b", "ill"]})
        client = JoinedClient(tmp_path / f"client-{number}", own, check=True)
        client.answer([offer_bytes(offer_of("r", number, configuration(tmp_path, "nowhere.csv")))])
        assert client.fits is fits


@pytest.mark.parametrize("fits", [True, False])
def test_the_exit_status_of_a_look_is_whether_it_fits(fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was 0 whether it fits or not."""
    (tmp_path / "consent.toml").write_text("[data]\npart = 0\n[lifetime.server]\nepsilon = 1.0\ndelta = 1e-5\n")
    ended: list[int] = []
    monkeypatch.chdir(tmp_path)  # where a client's folder is made
    monkeypatch.setattr("fedveil.deploy.join.join", lambda consent, joining: fits)
    monkeypatch.setattr("os._exit", ended.append)
    words = [
        "join",
        "fl.example.org:9700",
        "--ca",
        "ca.pem",
        "--key",
        "alice",
        "--consent",
        str(tmp_path / "consent.toml"),
        "--dir",
        str(tmp_path),
    ]
    CliRunner().invoke(app, [*words, "--check"])
    CliRunner().invoke(app, words)
    assert ended == [int(not fits), 0]


def test_a_second_process_of_a_folder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    """It overwrote the secret by which the first one reaches its SuperNode."""
    joining = Joining("fl.example.org:9700", Path("ca.pem"), Path("alice"), owner_only_folder(tmp_path / "state"))
    with _alone(joining) as secret:
        own = secret.read_bytes()
        with pytest.raises(ConfigError, match=rf"its number: {os.getpid()}\) has joined fl\.example\.org:9700"), _alone(joining):
            pass
        with _alone(replace(joining, server="192.0.2.7:9700")) as other:
            assert other.read_bytes() != own
        assert secret.read_bytes() == own
    with _alone(joining) as secret:
        assert secret.read_bytes() != own


def test_a_client_with_a_full_disk_is_charged_for_nothing(tmp_path: Path) -> None:
    """It was charged in each round for a release that never left."""
    there = machines(tmp_path / "clients")
    full = NoRoomForStates(tmp_path / "clients/2")

    def after(row: Any) -> None:
        full.__exit__()

    with full:
        result, _ = served(small(training={"rounds": 3}), tmp_path / "server", there, on_round=after)
    assert [row["participants"] for row in result.history] == [2, 3, 3]
    said = "refused: this client's disk has no room for what it keeps of a round: nothing was charged, and nothing is sent"
    assert result.history[0]["failures"] == {2: said}
    assert [entry.round for entry in rows(tmp_path / "clients/2/lifetime-server.sqlite")] == [1, 2]
    assert len(rows(tmp_path / "clients/1/lifetime-server.sqlite")) == 3
    assert not list((tmp_path / "clients").rglob("*.part"))


def test_a_machine_that_answers_with_errors_is_named_once_until_it_answers(tmp_path: Path) -> None:
    """As one with another fedveil, whose bundle is foreign to it: the server waits for it, and does not fill its log."""
    there, lines, waits = machines(tmp_path / "clients"), list[str](), list[int]()
    answers = there.answers

    def failing(messages: Any) -> Any:
        found = answers(messages)
        return found | dict.fromkeys([1] * (1 in messages and len(waits) < 3), "an error" if len(waits) < 2 else "another")

    there.answers = failing  # type: ignore[method-assign]
    asked = ConsentingClients(there, partial(offer_of, "r", config=small()), 3, lines.append)
    asked.gather({0, 1, 2}, 3, lambda: waits.append(1))
    assert (len(waits), asked.consented) == (3, {0, 1, 2})
    assert [line for line in lines if line.startswith("client 1")] == ["client 1: an error", "client 1: another"]


@pytest.mark.parametrize(
    ("flower", "said"),
    [
        (
            "exit 305, SuperNode authentication is enabled. All SuperNodes must be registered via the CLI.",
            "alice.pub to the server",
        ),
        ("exit 305, Client error '404 Not Found' for url 'https://x/v1/fleet/activate-node'", "alice.pub to the server"),
        ("exit 305, [code: 2004] Failed to activate SuperNode.", "Not admitted: send alice.pub to the server"),
        ("exit 305, [code: 2004] Failed to activate SuperNode.", "for up to a minute, and one of another process with this key"),
        ("SSLError: CERTIFICATE_VERIFY_FAILED", "not of the authority in ca.pem"),
        ("exit 1, something else", ""),
    ],
)
def test_what_flower_says_without_a_cause_is_explained(flower: str, said: str) -> None:
    found = advice(flower, Joining("fl.example.org:9700", Path("ca.pem"), Path("alice"), Path("state")))
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize("server", ["192.0.2.7", "192.0.2.7:", ":9700", "host:port", "host:99999"])
def test_a_server_without_a_port_is_refused_at_once(server: str, tmp_path: Path) -> None:
    for name in ("ca.pem", "key"):
        (tmp_path / name).write_text("-")
    with pytest.raises(ConfigError, match="named as host:port"):
        join(consent(0), Joining(server, tmp_path / "ca.pem", tmp_path / "key", tmp_path / "client"))


@pytest.mark.slow
def test_a_client_that_leaves_is_offered_the_run_again_when_it_is_back(tmp_path: Path) -> None:
    there = machines(tmp_path / "clients")

    def after(row: Any) -> None:
        there.off = {2} if row["round"] == 0 else set()

    result, _ = served(small(training={"rounds": 4}), tmp_path / "server", there, on_round=after)
    assert [row["participants"] for row in result.history] == [3, 2, 3, 3]
    assert result.history[1]["failures"] == {2: GONE}
    assert sum("consented as client 2" in line for line in there.lines) == 2
    assert sum("consented as client 1" in line for line in there.lines) == 1


def test_a_lost_lifetime_or_another_cap_is_refused(tmp_path: Path) -> None:
    client, offer = JoinedClient(tmp_path, consent(0)), offer_of("r", 0, small("aggregate"))
    assert read_consent(client.answer([offer_bytes(offer)]), offer) == ""
    wider = JoinedClient(tmp_path, consent(0, lifetime={"aggregate": {"epsilon": 100.0, "delta": 0.01}}))
    new = offer_of("r2", 0, small("aggregate"))
    record = "this client's own record of its lifetime does not allow it; its own log tells why"
    assert read_consent(wider.answer([offer_bytes(new)]), new) == record
    (tmp_path / "lifetime-aggregate.sqlite").unlink()
    assert read_consent(JoinedClient(tmp_path, consent(0)).answer([offer_bytes(new)]), new) == record


def test_an_offer_leaves_out_what_concerns_the_server_alone() -> None:
    whole = small(data={"data_dir": "/srv/data"}, run={"name": "x", "engine": "inline"})
    offer = read_offer(offer_bytes(offer_of("r", 0, whole)))
    assert "/srv" not in json.dumps(offer.config)
    assert "engine" not in offer.config["run"]
    assert offer.parsed().privacy == whole.privacy
    for bad in (Offer("../up", 0, {}), Offer("", 0, {}), Offer("a/b", 0, {})):
        with pytest.raises(WireError, match="letters, digits"):
            read_offer(offer_bytes(bad))


def test_the_client_certifies_what_the_server_states() -> None:
    found = check_offer(consent(0), offer_of("r", 0, small()).parsed())
    assert found.statement.proven.epsilon == pytest.approx(8, rel=1e-4)
    assert found.setting.scope.view is View.SERVER


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "data: missing"),
        ("[data]\n[lifetime.server]\nepsilon=1\ndelta=1e-5", "give file"),
        ('[data]\nfile="a.csv"\n[lifetime.server]\nepsilon=1\ndelta=1e-5', "data.columns: name the columns"),
        ("[data]\npart=0", "lifetime: missing"),
        ("[data]\npart=0\n[lifetime.trusted]\nepsilon=1\ndelta=1e-5", "lifetime.trusted"),
        ("[data]\npart=0\n[lifetime.server]\nepsilon=-1\ndelta=1e-5", "lifetime.server.epsilon = -1"),
        ("seed_noise = true\n[data]\npart=0", "seed_noise"),
        ("[", "cannot read the consent"),
    ],
)
def test_a_consent_that_says_too_little_or_something_else_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "consent.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_consent_file(tmp_path / "consent.toml")


def test_the_path_of_the_data_is_relative_to_the_consent(tmp_path: Path) -> None:
    (tmp_path / "consent.toml").write_text('[data]\nfile = "a.csv"\ncolumns = ["a"]\n[lifetime.server]\nepsilon=1\ndelta=1e-5')
    found: Consent = read_consent_file(tmp_path / "consent.toml")
    assert found.data.file == str(tmp_path / "a.csv")
