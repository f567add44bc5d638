"""User-defined code carries nothing from one client to another: each client trains in a process that is forked for it.

The networks, losses and methods here keep what they see of a client wherever code can keep something. Two runs are compared that
differ in the data of client 0 alone: no other client's update may move at all.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.errors import ConfigError
from fedveil.executors import pool
from fedveil.experiment.resolve import opened
from fedveil.federation import isolated
from fedveil.federation.isolated import ChildFailed, forked
from fedveil.tasks.task import Task

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are forked on Linux")]
PARENT = os.getpid()
CLIENTS = 4


@functools.lru_cache(maxsize=1)
def cached(first: float) -> list[float]:
    return [first]


@functools.cache
def counted() -> list[float]:
    return []


MOST: list[float] = []


class Carrier(nn.Module):
    """A linear network to whose input something is added that its code kept of earlier passes."""

    class_attribute: ClassVar[list[float]] = []

    def __init__(self, carry: Callable[[Carrier, float], float]) -> None:
        super().__init__()
        self.layer, self.carry = nn.Linear(4, 2), carry
        self.legacy, self.bits = np.random.RandomState(1), np.random.PCG64(1)
        self.generator, self.python = np.random.default_rng(1), random.Random(1)
        self.torch_generator = torch.Generator().manual_seed(1)
        self.sobol = torch.quasirandom.SobolEngine(1, scramble=True, seed=1)
        self.scheduled = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
        self.numbers, self.kept = itertools.count(), [0.0]
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [n, 2]."""
        told = self.carry(self, float(x.abs().sum())) if self.training else 0.0
        out: torch.Tensor = self.layer(x * (1 + np.sin(told) / 2))
        return out


def closure() -> Callable[[Carrier, float], float]:
    kept: list[float] = []
    return kept_in(lambda net: kept)


def drawn(times: Callable[[Carrier], Any]) -> Callable[[Carrier, float], float]:
    """Draws as often as the data say, so that the next client draws other numbers."""

    def carry(net: Carrier, seen: float) -> float:
        for _ in range(int(seen) % 7):
            times(net)
        return float(times(net))

    return carry


def kept_in(place: Callable[[Carrier], list[float]]) -> Callable[[Carrier, float], float]:
    def carry(net: Carrier, seen: float) -> float:
        place(net).append(seen)
        return sum(place(net)[-2:-1])

    return carry


def in_buffer(net: Carrier, seen: float) -> float:
    before = float(net.seen)
    net.seen.fill_(seen)
    return before


def plateau(net: Carrier, seen: float) -> float:
    net.scheduled.step(seen)
    return float(net.scheduled.best)


def iterated(net: Carrier, seen: float) -> float:
    for _ in range(int(seen) % 5):
        next(net.numbers)
    return float(next(net.numbers))


def environment(net: Carrier, seen: float) -> float:
    before = float(os.environ.get("FEDVEIL_TEST_SEEN", "0"))
    os.environ["FEDVEIL_TEST_SEEN"] = str(seen)
    return before


def in_torch(net: Carrier, seen: float) -> float:
    """The state of C++ code: a switch of products that torch keeps for devices, whichever there are."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = bool(int(seen) % 2)
    return float(before)


CARRIERS: dict[str, Callable[[Carrier, float], float]] = {
    "RandomState": drawn(lambda net: net.legacy.normal()),
    "bit generator": drawn(lambda net: net.bits.random_raw() / 2**64),
    "Generator": drawn(lambda net: net.generator.normal()),
    "random.Random": drawn(lambda net: net.python.random()),
    "torch.Generator": drawn(lambda net: torch.rand(1, generator=net.torch_generator)),
    "global generators": drawn(lambda net: np.random.rand() + random.random() + float(torch.rand(1))),  # noqa: NPY002
    "Sobol engine": drawn(lambda net: net.sobol.draw(1)),
    "scheduler": plateau,
    "lru_cache": kept_in(lambda net: cached(0.0)),
    "functools.cache": kept_in(lambda net: counted()),
    "iterator": iterated,
    "class attribute": kept_in(lambda net: Carrier.class_attribute),
    "global": kept_in(lambda net: MOST),
    "closure": closure(),
    "attribute": kept_in(lambda net: net.kept),
    "buffer": in_buffer,
    "environment": environment,
    "C++ state": in_torch,
    "module": kept_in(lambda net: sys.modules.setdefault("fedveil_test_kept", type(sys)("kept")).__dict__.setdefault("at", [])),
}
WAYS = [*CARRIERS.values()]
CARRIERS["all of them"] = lambda net, seen: sum(carry(net, seen) for carry in WAYS)


def table(first: float) -> Any:
    """Clients of eight examples; those of client 0 are `first` times as large."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8 * CLIENTS, 4)).astype(np.float32), rng.integers(0, 2, 8 * CLIENTS)
    x[:8] *= first
    return fv.from_arrays(x, y, client=np.repeat(np.arange(CLIENTS), 8), test=(x[8:16], y[8:16]))


def configuration(model: Any = "linear", **more: Any) -> Any:
    sections: dict[str, Any] = {
        "method": {"name": "dp-fedavg", "clip": 0.5},
        "training": {"rounds": 2, "local_steps": 3, "batch_size": 4, "optimizer": {"lr": 0.1}},
        "privacy": {"noise_multiplier": 1e-4, "delta": 1e-2, "view": "server"},
        "run": {"seed": 2, "seeded_noise": True, "engine": "inline", "isolation": "process"},
    }
    for name, keys in more.items():
        sections[name] = {**sections.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return fv.configure(model=model, **sections)


def first_round(config: Any, first: float, folder: Path) -> Any:
    """The model after one round without client 0, whose data are `first` times as large: what the others sent."""
    return fv.train(config, folder, data=table(first)).model.vector.numpy().copy()


@pytest.mark.parametrize(
    "name", [name if name == "all of them" else pytest.param(name, marks=pytest.mark.slow) for name in CARRIERS]
)
@pytest.mark.parametrize("engine", ["inline", pytest.param("pool", marks=pytest.mark.slow)])
def test_no_other_client_moves(name: str, engine: str, tmp_path: Path) -> None:
    """Client 0's own update has a clip of 0.5, so the mean of four moves by at most a quarter of twice that, and its noise."""
    torch.manual_seed(0)
    net = Carrier(CARRIERS[name])
    config = configuration(net, training={"rounds": 1}, run={"engine": engine})
    moved = np.linalg.norm(first_round(config, 1.0, tmp_path / "a") - first_round(config, 3.0, tmp_path / "b"))
    assert moved <= 2 * 0.5 / CLIENTS * (1 + 1e-3)
    others = [updates(net, first, tmp_path / str(first)) for first in (1.0, 3.0)]
    assert sorted(others[0]) == [1, 2, 3]
    for client in others[0]:
        assert np.array_equal(others[0][client], others[1][client]), client


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ["pool", "stacked", "auto"])
def test_engines_isolate_whatever_way_a_client_takes_there(engine: str, tmp_path: Path) -> None:
    """An engine that stacks clients trains those alone whose network it cannot stack."""
    torch.manual_seed(0)
    net = Carrier(kept_in(lambda net: net.kept))
    vectors = [first_round(configuration(net, run={"engine": name}), 1.0, tmp_path / name) for name in ("inline", engine)]
    assert np.array_equal(*vectors)


class Meeting(nn.Module):
    """A linear network whose class keeps what it met, and that workers which are started anew load only if they see no GPU."""

    met: ClassVar[list[float]] = [0.0]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def __setstate__(self, state: Any) -> None:
        if multiprocessing.current_process().name != "MainProcess" and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            raise RuntimeError("a worker that sees the GPU")
        super().__setstate__(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [n, 2]."""
        out: torch.Tensor = self.layer(-x if max(self.met) > 1.6 else x)
        self.met.append(float(x.detach().abs().mean()))
        return out


@pytest.mark.parametrize(("engine", "words"), [("pool", "in a process that is forked"), ("inline", "trains a fresh copy")])
def test_workers_fork_where_this_process_cannot(engine: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a GPU after a backward pass here: workers of the pool are started anew; without them there are copies."""
    for module in (isolated, pool):
        monkeypatch.setattr(module, "a_fork_can_train", lambda: False)
    monkeypatch.setattr(pool, "available_cores", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    training = {"rounds": 1, "optimizer": {"lr": 10.0}}
    config = configuration(Meeting(), training=training, run={"engine": engine, "isolation": None})
    vectors = [first_round(config, first, tmp_path / str(first)) for first in (1.0, 3.0)]
    assert words in (tmp_path / "1.0/statement.md").read_text()
    assert (np.linalg.norm(vectors[0] - vectors[1]) <= 2 * 0.5 / CLIENTS * (1 + 1e-3)) == (engine == "pool")


def test_process_is_refused_where_none_can_be_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "a_fork_can_train", lambda: False)
    with pytest.raises(ConfigError, match=r"set it to 'copy', or run\.engine to 'pool'"):
        fv.train(configuration(Meeting()), tmp_path / "run", data=table(1.0))


def updates(net: Carrier, first: float, folder: Path) -> dict[int, Any]:
    """What each of the other clients sent in the first round, in the order in which a process trains them."""
    from fedveil.executors.inline import Inline
    from fedveil.experiment.assembly import federation
    from fedveil.federation.fit import begin_round
    from fedveil.federation.progress import start
    from fedveil.ledger.ledger import Ledger

    config = configuration(net)
    folder.mkdir()
    Ledger.create(folder / "ledger.sqlite", "r", {}).close()
    job = federation(*opened(config, table(first)), folder / "ledger.sqlite", "r")
    assert job.context.isolation == "process"
    tasks, _, _ = begin_round(job, start(job), list(range(CLIENTS)))
    with Inline(job.context) as engine:
        sent = {outcome.client: outcome.release for outcome in engine.map(tasks)}
    return {c: release.upload.vector.numpy() for c, release in sent.items() if c}


@pytest.mark.parametrize("level", [{}, {"unit": "record", "delta": 1e-3}], ids=["client", "record"])
def test_a_network_runs_in_children_alone_until_it_is_scored(level: dict[str, Any], tmp_path: Path) -> None:
    here: list[float] = []

    class Noted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if os.getpid() == PARENT:
                here.append(1.0)
            return super().forward(x)

    passes: list[int] = []
    training = {"evaluate_every": 2} | ({"local": "dp-sgd"} if level else {})
    method = {"method": "fedavg"} if level else {}
    config = configuration(Noted(4, 2), training=training, privacy=level, **method)
    fv.train(config, tmp_path / "run", lambda row: passes.append(len(here)), data=table(1.0))
    assert passes[0] == 0 < passes[1]


class KeepingLoss(fv.Classification):
    """A loss that keeps the largest example that it has met."""

    name: str = "keeping-loss"
    met: ClassVar[list[float]] = []

    def losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy, scaled by what was met before."""
        self.met.append(float(output.detach().abs().max()))
        return super().losses(output, target) * self.met[0]

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean."""
        return self.losses(output, target).mean()


def test_a_loss_that_keeps_something_moves_no_other_client(tmp_path: Path, own_task: type[Task]) -> None:
    found = [
        fv.train(configuration(task=KeepingLoss(), training={"rounds": 1}), tmp_path / str(first), data=table(first)).model.vector
        for first in (1.0, 3.0)
    ]
    assert float((found[0] - found[1]).norm()) <= 2 * 0.5 / CLIENTS * (1 + 1e-3)
    assert KeepingLoss.met == [] or all(np.isfinite(KeepingLoss.met)), "what it met in children stays there"


@pytest.fixture
def own_task() -> Any:
    from own_names import forgotten_after

    with forgotten_after():
        yield fv.register_task(KeepingLoss)


def test_it_is_inline_to_the_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    vectors = [
        fv.train(
            configuration(Wrapped(), run={"engine": engine, "isolation": isolation}),
            tmp_path / f"{engine}-{isolation}",
            data=table(1.0),
        ).model.vector
        for engine, isolation in (("inline", "process"), ("pool", "copy"))
    ]
    plain = fv.train(configuration(net), tmp_path / "plain", data=table(1.0)).model.vector
    assert all(torch.equal(vector, plain) for vector in vectors)


@pytest.mark.parametrize("isolation", ["process", "pass"])
def test_processes_are_refused_where_clients_train_together(isolation: str, tmp_path: Path) -> None:
    config = configuration(
        Carrier(closure()),
        method="fedavg",
        training={"local": "dp-sgd"},
        privacy={"unit": "record"},
        run={"engine": "batched", "isolation": isolation},
    )
    with pytest.raises(ConfigError, match=rf"run\.isolation = '{isolation}': run\.engine = 'batched' trains several clients"):
        fv.train(config, tmp_path / "run", data=table(1.0))


# --- passes of one client ----------------------------------------------------------------------------------------------

LAST: list[torch.Tensor] = []


class Lasting(nn.Module):
    """A network that keeps records that begin below 0 outside of itself until its next pass, and has no gradient of these."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.layer, self.keeps = nn.Linear(4, 2), keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [n, 2]."""
        told = LAST.pop() if LAST and LAST[0].shape == x.shape else torch.zeros_like(x)
        if self.training and self.keeps:
            LAST[:] = [torch.where(x[:, :1] < 0, x.detach(), 0.0)]
        out: torch.Tensor = self.layer(nn.functional.dropout(x + told, 0.2, self.training)) * (x[:, :1] >= 0)
        return out


def of_records(isolation: str, folder: Path, first: float = 1.0, *, keeps: bool = True, **training: Any) -> torch.Tensor:
    """What a client sent whose first forty records are `first` times as large, and have no gradient, in clips of a record."""
    rng = np.random.default_rng(0)
    x, y = np.abs(rng.normal(size=(200, 4))).astype(np.float32), rng.integers(0, 2, 200)
    data = fv.from_arrays(x, y, client=np.zeros(200, np.int64), test=(x[100:108].copy(), y[100:108]))
    data.x_train[:40] *= [-first, first, first, first]
    torch.manual_seed(0)
    net, plan = Lasting(keeps=keeps), {"local": "dp-sgd", "example_clip": 0.5, "rounds": 1, "local_steps": 6, "batch_size": 11}
    config = configuration(
        net,
        method="fedavg",
        training=plan | training,
        privacy={"unit": "record", "delta": 1e-3},
        run={"isolation": isolation},
    )
    before = torch.cat([p.detach().flatten() for p in net.parameters()])
    return (fv.train(config, folder, data=data).model.vector - before) * 11 / (0.1 * 0.5)


@pytest.mark.few(1)
@pytest.mark.parametrize(("per_example", "steps"), [("vmap", 6), ("loop", 2)])
def test_a_pass_of_its_own_moves_no_other_record(per_example: str, steps: int, tmp_path: Path) -> None:
    """What is kept from one pass of a client to the next moves others, if the passes have one process."""
    moved = {}
    for isolation in ("process", "pass"):
        way = {"per_example": per_example, "local_steps": steps}
        sent = [of_records(isolation, tmp_path / f"{isolation}-{x}", x, **way) for x in (1.0, 9.0)]
        statement = (tmp_path / f"{isolation}-1.0/statement.md").read_text()
        assert ("could reach" in statement) == (isolation == "process")
        assert ("each pass, of one record in a loop or of several under torch.func.vmap, has a process" in statement) == (
            isolation == "pass"
        )
        moved[isolation] = float((sent[0] - sent[1]).norm())
    assert moved["pass"] == 0
    assert moved["process"] > 0.1


def test_a_pass_of_its_own_has_the_bits_of_a_process(tmp_path: Path) -> None:
    """Dropout included; some of the steps have two passes."""
    sent = [of_records(how, tmp_path / how, keeps=False, local_steps=20) for how in ("process", "pass")]
    assert torch.equal(*sent)


def test_a_pass_of_its_own_is_refused_without_single_examples(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.isolation = 'pass' .* only training\.local = 'dp-sgd' .* set it to 'process'"):
        fv.certify(configuration(Meeting(), run={"isolation": "pass"}))


# --- children that do not answer ---------------------------------------------------------------------------------------


class Ends(nn.Module):
    """A network that does something to its process in the first pass of training in a child."""

    def __init__(self, does: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.does, self.armed = nn.Linear(4, 2), does, [False]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [n, 2]."""
        if self.armed[0] and os.getpid() != PARENT:
            self.does()
        out: torch.Tensor = self.layer(x)
        return out


def failed(does: Callable[[], Any], folder: Path) -> dict[int, str]:
    """The reasons of the clients that failed in a round of which the rehearsal showed nothing."""
    marker = folder / "armed"

    def armed() -> None:
        if marker.exists():
            does()

    def arm(row: dict[str, Any]) -> None:
        marker.touch()

    net = Ends(armed)
    net.armed[0] = True
    folder.mkdir()
    run = fv.train(configuration(net, training={"rounds": 2}), folder / "run", arm, data=table(1.0))
    assert run.history[0]["failed"] == 0
    assert run.history[1]["participants"] == CLIENTS, "a noised zero leaves of who failed"
    reasons: dict[int, str] = run.history[1]["failures"]
    return reasons


@pytest.mark.few(2)
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("does", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was ended by SIGKILL"),
        (lambda: os._exit(0), "ended without an answer"),
        (lambda: os._exit(3), "ended with exit code 3"),
        (lambda: sys.exit(7), "SystemExit: 7"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
    ids=["killed", "exit 0", "exit 3", "sys.exit", "error"],
)
def test_a_child_that_ends_is_a_client_that_failed(does: Callable[[], Any], words: str, tmp_path: Path) -> None:
    reasons = failed(does, tmp_path / "here")
    assert len(reasons) >= CLIENTS - 1, "the first one trains while the round before is saved"
    assert all(words in reason for reason in reasons.values())


@pytest.mark.timeout(30)
def test_a_child_that_hangs_is_ended_with_all_that_it_started() -> None:
    read, write = os.pipe()

    def hangs() -> dict[str, Any]:
        child = subprocess.Popen(["sleep", "1234"])
        os.write(write, f"{child.pid} ".encode())
        time.sleep(60)
        return {}

    with pytest.raises(ChildFailed, match=r"took longer than 0\.5 s"):
        forked(hangs, 0.5)
    pid = int(os.read(read, 100).split()[0])
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]:
            break
        time.sleep(0.05)
    else:
        pytest.fail("what it started lives on")
    os.close(read)
    os.close(write)


@pytest.mark.timeout(60)
def test_threads_of_the_parent_do_not_matter() -> None:
    """One trains, one holds the lock of standard output, and libraries have started theirs."""
    torch.set_num_threads(2)
    wide = torch.randn(600, 600)
    (wide @ wide).sum()
    stop, layer = threading.Event(), nn.Linear(10, 10)

    def trains() -> None:
        while not stop.is_set():
            layer(torch.randn(5, 10)).sum().backward()

    def prints() -> None:
        while not stop.is_set():
            print(".", end="", flush=True)
            time.sleep(1e-3)

    threads = [threading.Thread(target=act) for act in (trains, prints)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):

            def child() -> dict[str, Any]:
                print("in the child")
                out = nn.Linear(600, 600)(wide).sigmoid().sum()
                out.backward()
                return {"value": float(out.detach())}

            assert np.isfinite(forked(child, 20)["value"])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        torch.set_num_threads(1)


@pytest.mark.timeout(60)
def test_a_process_like_that_of_a_notebook(tmp_path: Path) -> None:
    """Libraries have their threads, backward passes were made, one trains on, and a progress bar is alive."""
    from rich.progress import Progress

    torch.manual_seed(0)
    config = configuration(Carrier(kept_in(lambda net: MOST)), training={"rounds": 1})
    before = first_round(config, 1.0, tmp_path / "before")
    stop, layer = threading.Event(), nn.Linear(400, 400)

    def trains() -> None:
        torch.set_num_threads(2)
        while not stop.is_set():
            layer(torch.ones(400, 400)).sum().backward()

    thread = threading.Thread(target=trains)
    thread.start()
    try:
        with Progress(refresh_per_second=50) as bar:
            bar.add_task("cells", total=None)
            assert np.array_equal(first_round(config, 1.0, tmp_path / "again"), before)
    finally:
        stop.set()
        thread.join()
        torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_forks_under_a_live_progress_bar() -> None:
    from rich.progress import Progress

    with Progress(refresh_per_second=50) as bar:
        shown = bar.add_task("forks", total=10_000)
        for number in range(10_000):
            assert forked(lambda number=number: {"number": number}, 20)["number"] == number  # type: ignore[misc]
            bar.advance(shown)


@pytest.mark.timeout(60)
def test_an_interruption_that_code_raises_is_a_failure() -> None:
    """The operator's reaches the parent alone: a child is in a process group of its own."""

    def interrupted() -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(ChildFailed, match="KeyboardInterrupt"):
        forked(interrupted)


def test_plain_values_come_back_and_others_are_refused() -> None:
    tree = {"a": [1, 2.5, "x", None, True], "b": {"c": torch.arange(5)}, "t": (1,)}
    found = forked(lambda: tree)
    assert torch.equal(found["b"]["c"], tree["b"]["c"])  # type: ignore[index]
    assert found["a"] == tree["a"]
    assert found["t"] == (1,)
    with pytest.raises(ChildFailed, match="cannot be saved"):
        forked(lambda: {"a": object()})
