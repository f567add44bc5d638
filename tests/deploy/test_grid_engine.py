"""The engine over messages: equal to inline to the bit, and nothing that a client answers is trusted."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from by_hand import ONE
from by_hand import federation as by_hand
from federation_runs import bits, charged, config, covering, every_method, finished, job, same_state
from fedveil.deploy.grid_engine import GONE, GridEngine, GridExchange
from fedveil.deploy.round_messages import ReleaseMessage, read_reply, read_task
from fedveil.deploy.wire_format import MOST, Kind, WireMessage, decoded, encoded
from fedveil.errors import FedveilError
from fedveil.executors.inline import Inline
from fedveil.experiment.config import Config
from fedveil.federation.clients import Clients
from fedveil.federation.fit import fit
from fedveil.federation.progress import Federation, Progress, start
from fedveil.federation.round import ClientTask, Outcome
from fedveil.ledger.budgeted_ledger import named_bits
from fedveil.mechanism.plan import Released
from fedveil.methods.fedavg import DPFedAvg, FedAvg
from fedveil.release.sealed import SealedUpload
from flower_nodes import Nodes

RUNS = {name: c for name, c in every_method() if getattr(c.method, "variant", "proven") == "proven"}
KNOWN_TO_NOBODY = ("train_loss", "client_accuracy", "personal_accuracy", "mean_personal_accuracy", "mean_personal_test_accuracy")


def engine_of(run: Federation, folder: Path, **more: Any) -> GridEngine:
    return GridEngine(run.context, run.context.door.run, Nodes(run.context, folder, **more))


def assert_same_but_for_what_stays(one: Progress, inline: Progress, run: Federation) -> None:
    """Equal models and public states; what the history has of a round is either the same or absent."""
    assert bits(one.model) == bits(inline.model)
    for part in ("common", "policies", "seen", "server"):
        assert same_state(getattr(one, part), getattr(inline, part)), part
    assert one.privates == {}
    for row, other in zip(one.history, inline.history, strict=True):
        assert not set(row) & set(KNOWN_TO_NOBODY)
        public = {k: v for k, v in row.items() if k not in ("seconds", "by_client")}
        assert repr(public) == repr({k: other[k] for k in public})
        for cells, others in zip(row.get("by_client", []), other.get("by_client", []), strict="by_client" in row):
            assert cells.items() <= others.items()


def unnamed(folder: Path) -> list[Any]:
    """What the ledger holds, without the bits that each upload's row names."""
    rows = charged(folder)
    assert all(len(named_bits(row)) == 64 for row in rows if row.client >= 0 or row.mechanism == "banded")
    return [row if row.client < 0 else replace(row, note=row.note.partition("released")[0].removesuffix("; ")) for row in rows]


@pytest.mark.few(9)
@pytest.mark.parametrize("name", covering(RUNS))
def test_messages_equal_inline_to_the_bit(name: str, tmp_path: Path) -> None:
    reference_job = job(RUNS[name], tmp_path / "inline")
    reference = finished(reference_job, Inline(reference_job.context))
    run = job(RUNS[name], tmp_path / "wire")
    assert_same_but_for_what_stays(finished(run, engine_of(run, tmp_path / "clients")), reference, run)
    assert unnamed(tmp_path / "wire") == charged(tmp_path / "inline")


@pytest.mark.parametrize(("method", "z"), [(FedAvg(), None), (DPFedAvg(clip=0.1), 1.0)])
def test_private_statistics_and_released_ones(method: Any, z: float | None, tmp_path: Path) -> None:
    def run() -> Federation:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        return by_hand(method, [ONE, ONE, ONE], training={"rounds": 3}, z=z, module=module)

    one, two = run(), run()
    reference, other = finished(one, Inline(one.context)), finished(two, engine_of(two, tmp_path))
    assert bits(other.model) == bits(reference.model)
    assert (reference.buffers is None) == (z is not None)
    assert reference.buffers is None or (other.buffers is not None and torch.equal(other.buffers, reference.buffers))


def test_a_row_names_the_bits_of_an_upload_so_that_nobody_can_find_them_by_trying(tmp_path: Path) -> None:
    """A published ledger has the row's name for them; those who see sums alone are credited with the noise of all uploads."""
    plain: list[str] = []

    def listen(client: int, round: bytes, task: bytes, answer: bytes) -> bytes:
        message = read_reply(answer, read_task(task), run.context.door.parts.dimension)
        assert isinstance(message, ReleaseMessage)
        assert message.released is not None
        plain.append(hashlib.sha256(message.released.numpy().tobytes()).hexdigest())
        return answer

    run = job(config({"name": "dp-fedavg"}, "server", run={"seeded_noise": False}), tmp_path / "run")
    finished(run, engine_of(run, tmp_path / "clients", tamper=listen))
    named = {named_bits(row) for row in charged(tmp_path / "run")}
    assert len(named) == len(plain) == 12
    assert not named & set(plain)


def test_dp_sgd_at_record_level(tmp_path: Path) -> None:
    def made(folder: Path) -> Federation:
        more: dict[str, Any] = {"training": {"local": "dp-sgd", "batch_clip": None}, "privacy": {"unit": "record"}}
        return job(config({"name": "dp-fedavg"}, "server", **more), folder)

    one, two = made(tmp_path / "a"), made(tmp_path / "b")
    reference, other = finished(one, Inline(one.context)), finished(two, engine_of(two, tmp_path / "clients"))
    assert_same_but_for_what_stays(other, reference, two)
    assert [row["noise_norm"] for row in other.history] == [row["noise_norm"] for row in reference.history]


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_clients_plan_with_what_the_server_makes_of_public_examples(view: str, tmp_path: Path) -> None:
    def made(folder: Path) -> Federation:
        data = {"name": "digits", "partition": {"kind": "iid", "clients": 6}, "public_fraction": 0.1}
        return job(config({"name": "fed-smp", "mask": "public"}, view, data=data), folder)

    one, two = made(tmp_path / "a"), made(tmp_path / "b")
    reference, other = finished(one, Inline(one.context)), finished(two, engine_of(two, tmp_path / "clients"))
    assert_same_but_for_what_stays(other, reference, two)


def test_a_plan_that_reads_private_data_is_refused(tmp_path: Path) -> None:
    run = job(config({"name": "aldp-fl", "variant": "published"}, "server"), tmp_path)
    with pytest.raises(FedveilError, match=r"reads private data .* run.engine = 'flower' needs a variant"):
        finished(run, engine_of(run, tmp_path / "clients"))


# --- lengths ----------------------------------------------------------------------------------------------------------

GRIDS = [None, 2, 8, 24, 32]


def lengths(configuration: Config, folder: Path, absent: int | None) -> dict[tuple[int, int], int]:
    """Bytes of each answer by round and client; of the absent one's examples none are there."""
    run = job(configuration, folder / "run")
    found: dict[tuple[int, int], int] = {}

    def measure(client: int, common: bytes, task: bytes, answer: bytes) -> bytes:
        found[read_task(task).round, client] = len(answer)
        return answer

    nodes = Nodes(run.context, folder / "clients", tamper=measure)
    if absent is not None:
        nodes.context = replace(run.context, clients=without(run.context.clients, absent))
    finished(run, GridEngine(run.context, "r", nodes))
    return found


def without(clients: Clients, absent: int) -> Clients:
    parts = [np.arange(*clients.offsets[c : c + 2]) if c != absent else np.empty(0, np.int64) for c in range(len(clients))]
    return Clients.of(clients.x.numpy(), clients.y.numpy(), parts)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", covering(RUNS))
def test_the_length_of_an_answer_is_that_of_a_client_that_has_nothing(name: str, tmp_path: Path) -> None:
    """Whoever sees the lengths of encrypted records tells neighbouring data apart by no byte of them."""
    with_it, without_it = (lengths(RUNS[name], tmp_path / str(absent), absent) for absent in (None, 2))
    assert with_it == without_it
    assert any(client == 2 for _, client in with_it)


@pytest.mark.few(3)
@pytest.mark.parametrize("bits", GRIDS)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_so_it_is_on_any_grid(bits: int | None, view: str, tmp_path: Path) -> None:
    configuration = config({"name": "dp-fedavg"}, view, privacy={} if bits is None else {"grid_bits": bits})
    with_it, without_it = (lengths(configuration, tmp_path / str(absent), absent) for absent in (None, 2))
    assert with_it == without_it
    assert len({*with_it.values()}) == 1


# --- rounds that are asked for again ----------------------------------------------------------------------------------


class Crash(BaseException):
    pass


def until(rounds: int) -> Callable[[Progress], None]:
    def stop(progress: Progress) -> None:
        if progress.round == rounds:
            raise Crash

    return stop


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_a_round_that_is_asked_for_again_gets_the_same_answers_though_noise_is_secret(view: str, tmp_path: Path) -> None:
    method = {"name": "fedglp-adp", "variant": "proven"} if view == "server" else {"name": "dp-fedavg"}
    run = job(config(method, view, training={"clients_per_round": 6}, run={"seeded_noise": False}), tmp_path / "run")
    answers: list[tuple[int, bytes]] = []

    def note(client: int, common: bytes, task: bytes, answer: bytes) -> bytes:
        answers.append((client, answer))
        return answer

    engine, progress = engine_of(run, tmp_path / "clients", tamper=note), start(run)
    with pytest.raises(Crash):
        fit(run, engine, progress, until(1))
    saved = deepcopy(progress)
    with pytest.raises(Crash):
        fit(run, engine, progress, until(2))
    first, answers[:] = answers[6:], []
    ended, held = fit(run, engine, saved), charged(tmp_path / "run")
    assert answers[:6] == first
    if view == "server":  # the clients' own noise comes again from their disks: the same release, which is charged once
        assert ended == ""
        assert saved.history[1]["update_norm"] == progress.history[1]["update_norm"]
        assert [row.round for row in held] == [0] * 6 + [1] * 6 + [2] * 6
    else:  # the server's noise is fresh: a second release, which the server counts, and which takes the place of the last round
        assert "33.3332% of the budget and 0.0004% is left" in ended
        assert bits(saved.model) != bits(progress.model)
        assert [row.round for row in held] == [0, 1, 1]
    with pytest.raises(FedveilError, match=r"every client of round 0 failed.*asks for round 0 again"):
        fit(run, engine, start(run))


@pytest.mark.parametrize("name", ["fedanc-proven-server", "fedglp-adp-proven-server", "banded-mf-aggregate"])
def test_a_crash_at_any_round_changes_no_bit(name: str, tmp_path: Path) -> None:
    calm = job(RUNS[name], tmp_path / "calm")
    reference = finished(calm, Inline(calm.context))
    for lost in (1, 2):
        run = job(RUNS[name], tmp_path / f"run{lost}")
        engine, progress, kept = engine_of(run, tmp_path / f"c{lost}"), start(run), [start(run)]

        def keep(progress: Progress, kept: list[Progress] = kept, lost: int = lost) -> None:
            if progress.round == lost:
                raise Crash
            kept.append(deepcopy(progress))

        with pytest.raises(Crash):
            fit(run, engine, progress, keep)
        assert fit(run, engine, kept[-1]) == ""
        assert bits(kept[-1].model) == bits(reference.model)
        assert unnamed(tmp_path / f"run{lost}") == charged(tmp_path / "calm")


def test_a_damaged_state_is_refused_and_nothing_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = job(RUNS["fedglp-adp-proven-server"], tmp_path / "run")
    engine, progress = engine_of(run, tmp_path / "clients"), start(run)
    with pytest.raises(Crash):
        fit(run, engine, progress, until(1))
    for path in (tmp_path / "clients").rglob("0.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    fit(run, engine, progress)
    left_out = [why for row in progress.history[1:] for why in row["failures"].values()]
    assert left_out
    assert all("refused: this client's own record of the run does not allow it" in why for why in left_out)
    assert not any(str(tmp_path) in why for why in left_out)
    assert f"the client's state in {tmp_path}" in caplog.text


# --- answers that nobody honest gives ---------------------------------------------------------------------------------


def changed(answer: bytes, change: Callable[[dict[str, Any], dict[str, Any]], None], wide: bool = True) -> bytes:
    message = decoded(answer, Kind.RELEASE, most_packed=10**6)
    fields, arrays = dict(message.fields), dict(message.arrays)
    change(fields, arrays)
    packed = {k: bounds for k, bounds in message.packed.items() if k in arrays} if wide else {}
    for name, bounds in packed.items():  # as many bits as it takes
        values = arrays[name].reshape(-1)
        if len(values) != bounds[-1][0] or max(int(values.max()), -int(values.min())) > bounds[0][1]:
            packed[name] = [(len(values), MOST)]
    return encoded(WireMessage(message.kind, fields, arrays, packed))


def field(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda fields, arrays: fields.update({name: value})


def array(change: Callable[[Any], Any]) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda fields, arrays: arrays.update(released=change(arrays["released"]))


def most_of(answer: bytes) -> int:
    (bounds,) = decoded(answer, Kind.RELEASE, most_packed=10**6).packed.values()
    return bounds[0][1]


def packed_as(answer: bytes, bound: int) -> bytes:
    message = decoded(answer, Kind.RELEASE, most_packed=10**6)
    return encoded(replace(message, packed={"released": [(len(message.arrays["released"]), bound)]}))


def with_header(answer: bytes, change: Callable[[bytes], bytes]) -> bytes:
    end = 12 + struct.unpack("<I", answer[8:12])[0]
    header = change(answer[12:end])
    return answer[:8] + struct.pack("<I", len(header)) + header + answer[end:]


HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nothing": (lambda a: b"", "a message has"),
    "text": (lambda a: b"pickle" * 9, "not a message of fedveil"),
    "protocol": (lambda a: a[:4] + b"\x07\x00" + a[6:], "protocol version 7"),
    "foreign client": (lambda a: changed(a, field("client", 0)), "another task: client 0 where 3 was asked"),
    "no client": (lambda a: changed(a, field("client", 10**9)), "another task: client 1000000000 where 3 was asked"),
    "foreign run": (lambda a: changed(a, field("run", "other")), "another task: run other where r was asked"),
    "other round": (lambda a: changed(a, field("round", 7)), "another task: round 7 where"),
    "own weight": (lambda a: changed(a, field("weight", 0.5)), "another task: weight 0.5 where"),
    "false plan": (lambda a: changed(a, field("plan", "0" * 64)), "made another plan"),
    "shape": (lambda a: changed(a, array(lambda x: x[:-1])), "shape"),
    "two dimensions": (lambda a: changed(a, array(lambda x: x.reshape(2, -1))), "shape"),
    "floats": (lambda a: changed(a, array(lambda x: x.astype(np.float32)), False), "the plan asks for integers"),
    "NaN": (lambda a: changed(a, array(lambda x: np.full(len(x), np.nan, np.float32)), False), "the plan asks for integers"),
    "int32": (lambda a: changed(a, array(lambda x: (x >> 20).astype(np.int32)), False), "type torch.int32"),
    "huge": (lambda a: changed(a, array(lambda x: np.full(len(x), 2**62))), "another width"),
    "least integer": (lambda a: changed(a, array(lambda x: np.full(len(x), -(2**63)))), "another width"),
    "a thousandfold": (lambda a: changed(a, array(lambda x: x * 1000)), "another width"),
    "all at the bound": (lambda a: changed(a, array(lambda x: np.full(len(x), most_of(a)))), "allow"),
    "wider than planned": (lambda a: packed_as(a, MOST), "another width"),
    "no wider than its data": (lambda a: packed_as(a, most_of(a) - 1), "another width"),
    "a salt in words": (lambda a: changed(a, field("salt", "the diagnosis")), "'salt' must be 64 lower-case hex digits"),
    "a plan in words": (lambda a: changed(a, field("plan", "P" * 64)), "'plan' must be 64 lower-case hex digits"),
    "more fields": (lambda a: changed(a, field("loss", 0.5)), "too many or missing: 'loss'"),
    "fewer fields": (lambda a: changed(a, lambda fields, arrays: fields.pop("salt")), "too many or missing: 'salt'"),
    "spaces": (lambda a: with_header(a, lambda text: text.replace(b'"fields":', b'"fields": ')), "not written as"),
    "a field twice": (lambda a: with_header(a, lambda text: text.replace(b'"run":', b'"run":"x","run":')), "not written as"),
    "statistics": (
        lambda a: changed(a, lambda fields, arrays: arrays.update(buffers=np.zeros(3, np.float32))),
        "batch-norm statistics",
    ),
    "more arrays": (lambda a: changed(a, lambda fields, arrays: arrays.update(reads=np.zeros(3))), "unknown arrays"),
    "no release": (lambda a: changed(a, lambda fields, arrays: arrays.clear()), "no release arrived"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_a_hostile_client_is_left_out_and_the_model_is_as_without_it(view: str, tmp_path: Path) -> None:
    """It tries something else in each round."""
    configuration = config(
        {"name": "dp-fedavg"}, view, training={"clients_per_round": 6, "rounds": len(HOSTILE), "local_steps": 1}
    )
    changes = [change for change, _ in HOSTILE.values()]

    def attack(client: int, common: bytes, task: bytes, answer: bytes) -> bytes:
        return changes[read_task(task).round](answer) if client == 3 else answer

    run, without = job(configuration, tmp_path / "run"), job(configuration, tmp_path / "without")
    progress = finished(run, engine_of(run, tmp_path / "clients", tamper=attack))
    reference = finished(without, engine_of(without, tmp_path / "others", gone={3}))
    assert bits(progress.model) == bits(reference.model)
    assert charged(tmp_path / "run") == charged(tmp_path / "without")
    for row, (name, (_, said)) in zip(progress.history, HOSTILE.items(), strict=True):
        assert row["participants"] == 5, name
        assert said in row["failures"][3]


def test_a_replayed_answer_is_refused(tmp_path: Path) -> None:
    run, first = job(RUNS["dp-fedavg-server"], tmp_path / "a"), {}

    def replay(client: int, common: bytes, task: bytes, answer: bytes) -> bytes:
        return first.setdefault(client, answer)

    progress = start(run)
    fit(run, engine_of(run, tmp_path / "c", tamper=replay), progress)
    again = [(row["round"], why) for row in progress.history for why in row["failures"].values()]
    assert again
    assert all(
        re.fullmatch(rf"an answer to another task: round [0-{round - 1}] where {round} was asked", why) for round, why in again
    )


def test_a_contribution_above_its_clip_is_refused(tmp_path: Path) -> None:
    """In the aggregate view no noise hides it: a norm of a 20,000th too much is seen."""
    run = job(RUNS["dp-fedavg-aggregate"], tmp_path / "a")
    door, policy = run.context.door, run.context.policy
    plan = policy.plan(Released(0, run.context.model.vector, None), policy.start())
    (_, exponent), *_ = door.parts.grid(plan)
    clip = int(plan.clip * 2.0**-exponent)

    def above(client: int, common: bytes, task: bytes, answer: bytes) -> bytes:
        return changed(answer, array(lambda x: np.concatenate([[clip, clip // 100], np.zeros(len(x) - 2, np.int64)])))

    with pytest.raises(FedveilError, match=r"every client of round 0 failed.*allow"):
        finished(run, engine_of(run, tmp_path / "c", tamper=above))


class Grid:
    """Of six clients, each on the node of its number; messages are (client, parts).

    Args:
        silent: never answers. lost: goes away with the first message and is back when looked for so many times.
    """

    def __init__(self, nodes: Nodes, silent: int = -1, lost: int = -1, back: int = 3) -> None:
        self.nodes, self.silent, self.lost, self.back = nodes, silent, lost, back
        self.sent: dict[str, tuple[int, Any]] = {}
        self.gone = False

    def online(self) -> dict[int, int]:
        self.back -= self.gone
        self.gone = self.gone and self.back > 0
        return {client: client for client in range(6) if not (self.gone and client == self.lost)}

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        ids = [f"m{len(self.sent) + i}" for i in range(len(list(messages)))]
        self.sent.update(zip(ids, messages, strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Any]:
        for name in message_ids:
            client, parts = self.sent[name]
            failed = client == self.lost and self.back > 0
            if client != self.silent:
                answer = self.nodes.node(client).answer(*parts)  # if it is lost: before its answer got through
                self.gone = self.gone or failed
                error = SimpleNamespace(code=5, reason="")
                meta = SimpleNamespace(reply_to_message_id=name)
                yield SimpleNamespace(metadata=meta, answer=answer, has_error=lambda failed=failed: failed, error=error)


@pytest.fixture
def by_hand_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.deploy.grid_engine.instruction", lambda node, parts: (node, parts))
    monkeypatch.setattr("fedveil.deploy.grid_engine.content_of", lambda message: message.answer)


@pytest.mark.usefixtures("by_hand_messages")
def test_a_client_that_does_not_answer_in_time_is_named_with_the_seconds(tmp_path: Path) -> None:
    run, lines = job(RUNS["dp-fedavg-server"], tmp_path / "a"), list[str]()
    grid = Grid(Nodes(run.context, tmp_path / "c"), silent=2)
    exchange = GridExchange(grid, grid.online, timeout=0.05, poll=0.01)
    progress = finished(run, GridEngine(run.context, run.context.door.run, exchange, lines.append))
    late = [row["round"] for row in progress.history if 2 in row["failures"]]
    assert len(late) > 1
    assert lines == [f"round {late[0]}: client 2 is left out: no answer within 0.05 seconds"]


@pytest.mark.usefixtures("by_hand_messages")
@pytest.mark.parametrize(("back", "absence"), [(3, 60.0), (10**9, 0.02)])
def test_a_machine_that_is_lost_is_asked_again_when_it_is_back(back: int, absence: float, tmp_path: Path) -> None:
    """Its first answer got lost: it comes again, to the bit. One that stays away is left out after a while."""
    configuration = config({"name": "dp-fedavg"}, "server", training={"clients_per_round": 6})
    run, calm, lines = job(configuration, tmp_path / "a"), job(configuration, tmp_path / "b"), list[str]()
    grid = Grid(Nodes(run.context, tmp_path / "c"), lost=2, back=back)
    exchange = GridExchange(grid, grid.online, timeout=60.0, poll=0.001, absence=absence)
    progress = finished(run, GridEngine(run.context, run.context.door.run, exchange, lines.append))
    reference = finished(calm, Inline(calm.context))
    assert (bits(progress.model) == bits(reference.model)) == (back == 3)
    assert lines == ([] if back == 3 else [f"round 0: client 2 is left out: {GONE}"])


def fuzzed(messages: int, tmp_path: Path) -> int:
    """Answers with random bytes changed, cut or doubled: how many are refused; the others changed what carries noise anyway."""
    rng, run = np.random.default_rng(1), job(RUNS["dp-fedavg-server"], tmp_path)
    asked: list[ClientTask] = []
    real: dict[int, bytes] = {}

    class Spy(GridEngine):
        def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
            asked[:] = tasks
            return super().map(asked)

    def keep(client: int, common: bytes, task: bytes, answer: bytes) -> bytes:
        return real.setdefault(client, answer)

    one = replace(run, setting=replace(run.setting, rounds=1))
    fit(one, Spy(run.context, "r", Nodes(run.context, tmp_path / "clients", keep)), start(run))
    answers = list(real.values())

    def mutated(answer: bytes) -> bytes:
        content = bytearray(answers[rng.integers(len(answers))] if rng.random() < 0.2 else answer)
        for _ in range(rng.integers(1, 20)):
            where, kind = int(rng.integers(min(len(content), 200 if rng.random() < 0.7 else len(content)))), rng.integers(3)
            if kind == 0:
                content[where] = int(rng.integers(256))
            elif kind == 1 and len(content) > 300:
                del content[where : where + int(rng.integers(1, 9))]
            else:
                content[where:where] = content[: int(rng.integers(1, 30))]
        return bytes(content)

    class Mutated:
        def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> Mapping[int, bytes | str]:
            return {client: mutated(real[client]) for client in messages}

    engine, refused = GridEngine(run.context, "r", Mutated()), 0
    for _ in range(-(-messages // len(asked))):
        for outcome in engine.map(asked):
            refused += bool(outcome.error)
            assert outcome.error or isinstance(outcome.release, SealedUpload)
    return refused


def test_no_fuzzed_answer_breaks_a_round(tmp_path: Path) -> None:
    assert fuzzed(300, tmp_path) > 270


@pytest.mark.slow
def test_ten_thousand_fuzzed_answers(tmp_path: Path) -> None:
    assert fuzzed(10_000, tmp_path) > 9000
