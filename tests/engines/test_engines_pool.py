"""Engine `pool`: equal to inline to the bit for every method; dead and hanging workers; nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedveil.executors.pool as pool_module
from by_hand import ONE
from by_hand import federation as by_hand
from federation_runs import assert_same, charged, config, covering, every_method, finished, gone, job
from fedveil.errors import ConfigError, FedveilError
from fedveil.executors.inline import Inline
from fedveil.executors.pool import ProcessPool, start_method, work
from fedveil.executors.select_engine import device_for, engine
from fedveil.federation.fit import fit
from fedveil.federation.isolated import a_fork_can_train
from fedveil.federation.progress import Federation, Progress, start
from fedveil.federation.round import Engine
from fedveil.methods.base import Policy, Setting, gaussian_plan
from fedveil.methods.fedavg import DPFedAvg, FedAvg
from fedveil.methods.method import Method
from fedveil.training.local import Local, Plain, Remembering
from forked_program import ForkedProgram
from method_kit import planner

RUNS = dict(every_method())


def test_every_method_is_covered_in_some_view() -> None:
    from fedveil.methods.method_registry import METHODS

    assert {configuration.method.name for configuration in RUNS.values()} == set(METHODS)
    assert {configuration.privacy.view.value for configuration in RUNS.values()} >= {"server", "aggregate"}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", covering(RUNS))
def test_pool_equals_inline_to_the_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.executors.pool_messages.LEAST", 1)  # as if the network were large: all tensors lie in slots
    reference_job = job(RUNS[name], tmp_path / "inline")
    reference = finished(reference_job, Inline(reference_job.context))
    for workers in (1, 2, 3) if name.startswith(("dp-fedavg", "aldp")) else (2,):
        run = job(RUNS[name], tmp_path / f"pool{workers}")
        assert_same(finished(run, ProcessPool(run.context, workers)), reference)
        assert charged(tmp_path / f"pool{workers}") == charged(tmp_path / "inline")


SPAWNED = ["aldp-fl-published-server"]


def test_workers_are_spawned_where_a_forked_process_cannot_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, PyTorch forbids backward passes in a forked process once its parent has made one."""
    assert a_fork_can_train()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert a_fork_can_train()

    def forbidden(*_: object) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")

    monkeypatch.setattr(torch.Tensor, "backward", forbidden)
    assert not a_fork_can_train()


def test_workers_are_spawned_where_the_parent_trains_on_public_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps come after the pool has asked whether a forked process can train."""
    plain = job(RUNS[SPAWNED[0]], tmp_path / "run").context
    asking = replace(plain, policy=planner(Asking(), plain.policy.setting))
    assert (start_method(plain), start_method(asking)) == ("fork", "fork")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (start_method(plain), start_method(asking)) == ("fork", "spawn")


class Asking(Policy):
    """A policy that makes the server train."""

    public_steps = 1

    def plan(self, s: Setting, seen: Any, state: Any) -> Any:
        raise AssertionError("nobody asks for a plan here")


@pytest.mark.parametrize("name", [n if n in SPAWNED else pytest.param(n, marks=pytest.mark.slow) for n in RUNS])
def test_spawned_workers_equal_inline_to_the_bit(name: str, tmp_path: Path) -> None:
    run = job(RUNS[name], tmp_path / "inline")
    reference = finished(run, Inline(run.context))
    other = job(RUNS[name], tmp_path / "spawned")
    assert_same(finished(other, ProcessPool(other.context, 2, "spawn")), reference)


@pytest.mark.parametrize(("method", "z"), [(FedAvg(), None), (DPFedAvg(clip=0.1), 1.0)])
def test_private_statistics_and_released_ones_travel(method: Method, z: float | None) -> None:
    def run() -> Federation:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        return by_hand(method, [ONE, ONE, ONE], training={"rounds": 3}, z=z, module=module)

    one, two = run(), run()
    reference = finished(one, Inline(one.context))
    assert (reference.buffers is None) == (z is not None)
    other = finished(two, ProcessPool(two.context, 2))
    assert_same(other, reference)
    assert reference.buffers is None or (other.buffers is not None and torch.equal(other.buffers, reference.buffers))


def test_states_of_many_clients_keep_no_files_open(tmp_path: Path) -> None:
    configuration = config(
        {"name": "aldp-fl", "variant": "published"},
        "server",
        data={"partition": {"kind": "iid", "clients": 60}},
        training={"clients_per_round": 60, "rounds": 2},
    )
    run = job(configuration, tmp_path)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    progress = finished(run, ProcessPool(run.context, 2))
    assert len(progress.privates) == 60
    assert not before or len(os.listdir("/proc/self/fd")) < before + 20


# --- workers that die or hang -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Misbehaving:
    """Plain training, except that one client does something to its process; `marks` counts how often."""

    inner: Plain
    client_examples: int
    how: str
    marks: str
    times: int = 100

    def begin(self, local: Local) -> None:
        self.inner.begin(local)
        if local.examples != self.client_examples:
            return
        with open(self.marks, "a") as file:
            file.write("x")
        if len(Path(self.marks).read_text()) > self.times:
            return
        if self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    def step(self, local: Local, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.inner.step(local, x, y)

    def finish(self, local: Local) -> torch.Tensor:
        return self.inner.finish(local)


def misbehaving(folder: Path, how: str, view: str, times: int = 100) -> tuple[Federation, int]:
    """A run of two rounds over six unequal clients in which one, returned beside it, misbehaves."""
    configuration = config(
        {"name": "dp-fedavg"},
        view,
        data={"partition": {"kind": "dirichlet", "clients": 6, "alpha": 0.5}},
        training={"clients_per_round": 6, "rounds": 2},
    )
    run = job(configuration, folder)
    sizes = run.context.clients.sizes().tolist()
    victim = next(c for c in range(6) if sizes.count(sizes[c]) == 1)
    objective = Misbehaving(Plain(), sizes[victim], how, str(folder / "marks"), times)
    return replace(run, context=replace(run.context, objective=objective)), victim


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_a_killed_worker_is_replaced_and_its_client_retried_once_then_reported(view: str, tmp_path: Path) -> None:
    run, victim = misbehaving(tmp_path, "die", view)
    progress = finished(run, ProcessPool(run.context, 2))
    assert (tmp_path / "marks").read_text() == "xx" * 2
    for row in progress.history:
        assert row["failures"] == {victim: "its worker process died (tried 2 times)"}
        assert row["participants"] == 5
    entries = charged(tmp_path)
    if view == "server":
        assert [(e.round, e.client) for e in entries] == [(t, c) for t in (0, 1) for c in range(6) if c != victim]
    else:
        assert [e.participants for e in entries] == [5, 5]


def test_a_client_whose_worker_dies_once_takes_part_after_all(tmp_path: Path) -> None:
    run, _ = misbehaving(tmp_path / "a", "die", "aggregate", times=1)
    calm, _ = misbehaving(tmp_path / "b", "die", "aggregate", times=0)
    assert_same(finished(run, ProcessPool(run.context, 2)), finished(calm, Inline(calm.context)))


def _kill_all(pool: ProcessPool) -> None:
    for worker in pool._workers:
        os.kill(worker.process.pid or 0, signal.SIGKILL)
        worker.process.join()


def test_workers_killed_between_rounds_are_replaced(tmp_path: Path) -> None:
    run = job(RUNS["dp-fedavg-aggregate"], tmp_path / "a")
    pool, progress = ProcessPool(run.context, 2), start(run)

    def kill(_: Progress) -> None:
        _kill_all(pool)

    assert fit(run, pool, progress, kill) == ""
    calm = job(RUNS["dp-fedavg-aggregate"], tmp_path / "b")
    assert_same(progress, finished(calm, Inline(calm.context)))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the starts of forked workers")
def test_a_replacement_that_dies_before_it_is_up_costs_its_client_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the first replacement finds no memory: the client is reported, the next replacement goes on."""
    starts = tmp_path / "starts"

    def second_dies(*arguments: Any) -> None:
        with starts.open("a") as file:
            file.write("x")
        if starts.stat().st_size == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        work(*arguments)

    monkeypatch.setattr(pool_module, "work", second_dies)
    run, victim = misbehaving(tmp_path, "die", "aggregate", times=1)
    progress = finished(run, ProcessPool(run.context, 1))
    assert [row["failures"] for row in progress.history] == [{victim: "its worker process died (tried 2 times)"}, {}]


def test_an_idle_worker_that_died_and_whose_replacement_dies_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = job(RUNS["dp-fedavg-aggregate"], tmp_path / "a")
    pool, progress = ProcessPool(run.context, 2), start(run)

    def kill(_: Progress) -> None:
        _kill_all(pool)
        real = pool._renewed

        def dead(place: int) -> Any:
            monkeypatch.setattr(pool, "_renewed", real)
            worker = real(place)
            worker.process.kill()
            worker.process.join()
            return worker

        monkeypatch.setattr(pool, "_renewed", dead)

    assert fit(run, pool, progress, kill) == ""
    calm = job(RUNS["dp-fedavg-aggregate"], tmp_path / "b")
    assert_same(progress, finished(calm, Inline(calm.context)))


def test_workers_that_never_come_up_name_classes_of_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spawned worker cannot load what was defined there."""
    monkeypatch.setattr(pool_module, "work", lambda *_: os._exit(1))
    run = job(RUNS["dp-fedavg-aggregate"], tmp_path)
    with pytest.raises(FedveilError, match=r"classes defined in a notebook .* must be put in a module"):
        fit(run, ProcessPool(run.context, 1), start(run))


@dataclass(frozen=True)
class Unsendable(Remembering):
    """Plain training whose clients keep something that no pipe carries."""

    inner: Plain
    kept: Any

    def begin(self, local: Local) -> None:
        self.inner.begin(local)

    def step(self, local: Local, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.inner.step(local, x, y)

    def finish(self, local: Local) -> torch.Tensor:
        if local.examples % 2:
            local.state["kept"] = self.kept
        return self.inner.finish(local)


def test_a_state_that_cannot_be_sent_is_its_client_s_failure(tmp_path: Path) -> None:
    run, _ = misbehaving(tmp_path, "die", "aggregate", times=0)
    odd = [c for c, size in enumerate(run.context.clients.sizes().tolist()) if size % 2]
    assert 0 < len(odd) < 6
    run = replace(run, context=replace(run.context, objective=Unsendable(Plain(), torch.zeros(2, dtype=torch.bfloat16))))
    pool = ProcessPool(run.context, 2)
    for row in finished(run, pool).history:
        assert list(row["failures"]) == odd
        for why in row["failures"].values():
            assert re.search(r"^its answer cannot be sent to the main process: .*BFloat16", why)


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_a_hanging_client_is_left_out_with_the_reason(view: str, tmp_path: Path) -> None:
    run, victim = misbehaving(tmp_path, "hang", view)
    progress = finished(run, engine("auto", run.context, timeout=0.5))
    for row in progress.history:
        assert row["failures"] == {victim: "no answer within 0.5 seconds"}
    assert (tmp_path / "marks").read_text() == "xx"


def test_a_timeout_needs_the_pool(tmp_path: Path) -> None:
    run = job(RUNS["fedavg-aggregate"], tmp_path)
    with pytest.raises(ConfigError, match="inline cannot interrupt"):
        engine("inline", run.context, timeout=1.0)
    for name in ("inline", "batched", "cuda"):
        with pytest.raises(ConfigError, match=f"{name} cannot interrupt"):
            device_for(name, timeout=1.0)
    with pytest.raises(ConfigError, match="must be > 0"):
        ProcessPool(run.context, timeout=0.0)
    assert isinstance(engine("auto", run.context, timeout=1.0), ProcessPool)
    with pytest.raises(ConfigError, match="did you mean 'pool'"):
        engine("pol", run.context)


@pytest.mark.parametrize(("cores", "kind"), [(1, Inline), (2, ProcessPool)])
def test_auto_is_the_pool_where_there_are_several_cores(
    cores: int, kind: type[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedveil.executors.select_engine.available_cores", lambda: cores)
    assert type(engine("auto", job(RUNS["fedavg-aggregate"], tmp_path).context)) is kind


def test_inside_a_process_that_may_not_start_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a worker of multiprocessing.Pool."""
    run = job(RUNS["fedavg-aggregate"], tmp_path)
    monkeypatch.setattr("fedveil.executors.select_engine.available_cores", lambda: 2)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert isinstance(engine("auto", run.context), Inline)
    for name, timeout in (("pool", None), ("auto", 1.0)):
        for made in (lambda n, t: engine(n, run.context, t), device_for):
            with pytest.raises(ConfigError, match=r"a worker of multiprocessing\.Pool may not start any"):
                made(name, timeout)


@dataclass(frozen=True)
class Broken(Policy):
    """A policy with a bug after its release."""

    def plan(self, s: Setting, seen: Any, state: Any) -> Any:
        return gaussian_plan(s, 0.5)

    def observe(self, s: Setting, state: Any, left: Any) -> Any:
        raise ZeroDivisionError("a bug")


def test_a_bug_outside_training_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    run = job(RUNS["dp-fedavg-server"], tmp_path)
    run = replace(run, context=replace(run.context, policy=planner(Broken(), run.setting)))
    pool = ProcessPool(run.context, 2)
    with pytest.raises(RuntimeError, match=r"in a worker:(.|\n)*ZeroDivisionError: a bug"):
        fit(run, pool, start(run))
    assert pool._workers == []


# --- endings ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="looks processes up in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_the_run(how: signal.Signals, tmp_path: Path) -> None:
    endless = {"rounds": 100000, "local_steps": 200}
    run = job(config({"name": "dp-fedavg"}, training=endless, privacy={"epsilon": None, "noise_multiplier": 1.0}), tmp_path)

    def act() -> None:
        pool = ProcessPool(run.context, 2)

        def tell(progress: Progress) -> None:
            if progress.round == 1:
                print(*[w.process.pid for w in pool._workers], flush=True)

        fit(run, pool, start(run), tell)

    with ForkedProgram(act) as program:
        workers = [int(pid) for pid in program.output.readline().split()]
        assert len(workers) == 2
        os.kill(program.pid, how)
        deadline = time.monotonic() + 20.0
        while not all(map(gone, workers)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(map(gone, workers))
        if how == signal.SIGINT:
            assert program.output.read().rstrip().endswith("KeyboardInterrupt")
        assert program.status() == (-how if how == signal.SIGKILL else 1)
