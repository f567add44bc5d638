"""What could have been known before a run is known then: nothing is made or charged, and the error says where and why."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedveil as fv
from federation_runs import covering, every_method, rehearsed
from fedveil.data.dataset import Dataset
from fedveil.errors import ConfigError, FedveilError
from fedveil.experiment import child_process, rehearsal
from fedveil.experiment.child_process import in_child
from fedveil.experiment.resolve import opened
from fedveil.mechanism.plan import Plan, Released, Upload
from fedveil.methods.base import MethodConfig, Policy, Release, Setting, Summed, SumServer, gaussian_plan
from fedveil.methods.method_registry import METHODS, register
from fedveil.tasks.task_registry import TASKS
from fedveil.training.local import State
from own_names import forgotten_after
from task_runs import BY_EXAMPLE, made, small
from task_runs import TASKS as SECTIONS

pytestmark = pytest.mark.heavy
ENGINES = ("inline", "pool", "stacked", "batched", "flower")
CLIENT: dict[str, Any] = {"method": {"name": "dp-fedavg", "clip": 0.5}, "privacy": {"epsilon": 8.0, "delta": 1e-2}}
RECORD: dict[str, Any] = {
    "method": {"name": "fedavg"},
    "training": {"local": "dp-sgd"},
    "privacy": {"unit": "record", "epsilon": 8.0, "delta": 1e-2},
}
HERE = r"\(at .*test_rehearsal\.py:\d+\)"
PARENT = os.getpid()


def data(classes: int = 3, count: int = 24) -> Dataset:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(count, 4)).astype("float32"), draw.integers(0, classes, count)
    found: Dataset = fv.from_arrays(x, y, client=np.arange(count) % 3, test=(x[:6], y[:6]))
    return found


class Net(nn.Module):
    """A small network whose output goes through a function."""

    def __init__(self, then: Callable[[Net, Tensor], Any] = lambda net, out: out) -> None:
        super().__init__()
        self.first, self.last, self.then = nn.Linear(4, 8), nn.Linear(8, 3), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self, self.last(torch.relu(self.first(x))))


def train(path: Path, model: Any, engine: str = "inline", level: dict[str, Any] | None = None, **more: Any) -> Any:
    sections: dict[str, Any] = {"training": {"rounds": 2, "batch_size": 4}}
    sections["run"] = {"engine": engine, "seed": 1, "seeded_noise": True}
    for section, values in (*(level or CLIENT).items(), *more.items()):
        sections[section] = {**sections.get(section, {}), **values} if isinstance(values, dict) else values
    return fv.train(fv.configure(model=model, **sections), path, data=data())


def in_evaluation(net: Net, out: Tensor) -> Tensor:
    return out if net.training else out[:, :0].argmax(1)


def looks_up(net: Net, out: Tensor) -> Tensor:
    empty: dict[str, Tensor] = {}
    return empty["the table"]


def kills(net: Net, out: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL if os.getpid() != PARENT else 0)
    return out


def leaves(net: Net, out: Tensor) -> Tensor:
    if os.getpid() != PARENT:
        os._exit(3)
    return out


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        raise OSError("the slope is in the other file")


FAILING: dict[str, tuple[Callable[[Net, Tensor], Any], str]] = {
    "lookup": (looks_up, rf"KeyError: 'the table' {HERE}"),
    "backward": (
        lambda net, out: NoBackward.apply(out),
        rf"gradients of Net {HERE} cannot be computed: OSError: the slope is in the other file",
    ),
    "exit": (lambda net, out: exit(7), r"failed in the forward pass and the loss: SystemExit: 7"),
    "complex": (lambda net, out: out.to(torch.complex64), r"makes complex64 \[4, 3\].*one floating-point tensor"),
    "integers": (lambda net, out: out.argmax(1), r"makes int64 \[4\].*one floating-point tensor"),
    "tuple": (lambda net, out: (out, out), r"makes a tuple of float32 \[4, 3\], float32 \[4, 3\] of examples"),
    "dictionary": (lambda net, out: {"logits": out}, r"makes a dict of logits: float32 \[4, 3\] of examples"),
    "evaluation": (in_evaluation, r"IndexError: .*argmax.*it takes 4 at once"),
    "killed": (kills, "failed in the forward pass and the loss: its process was ended by SIGKILL, as where memory runs out"),
    "left": (leaves, "failed in the forward pass and the loss: its process ended with exit code 3; nothing was released"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("failing", FAILING)
def test_what_fails_is_said_before_anything_is_made_in_the_same_words_on_each_engine(failing: str, tmp_path: Path) -> None:
    then, words = FAILING[failing]
    told = set()
    for engine in ENGINES:
        with pytest.raises(FedveilError, match=words) as refused:
            train(tmp_path / "run", Net(then), engine)
        told.add(str(refused.value))
        assert not (tmp_path / "run").exists()
    assert len(told) == 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_as_few_clients_as_there_are(count: int, tmp_path: Path) -> None:
    whole = data()
    few = fv.from_arrays(whole.x_train, whole.y_train, client=np.arange(24) % count, test=(whole.x_test, whole.y_test))
    fv.train(fv.configure(model=Net(), method="fedavg", training={"rounds": 1}), tmp_path / "run", data=few)
    with pytest.raises(ConfigError, match="the table"):
        fv.train(fv.configure(model=Net(looks_up), method="fedavg"), tmp_path / "refused", data=few)


def test_the_note_of_an_error_has_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        train(tmp_path / "run", Net(looks_up))
    assert 'return empty["the table"]' in refused.value.__notes__[0]


# --- a child that does not answer, and what it leaves -------------------------------------------------------------------


def test_a_child_that_hangs_is_ended_with_all_that_it_started() -> None:
    def hangs(stage: Callable[[str], None]) -> None:
        stage("in the loss")
        subprocess.Popen(["sleep", "61.7351"])
        time.sleep(60)

    with pytest.raises(FedveilError, match=r"it hung in the loss: its process said nothing for 0\.5 s, and was ended"):
        in_child(hangs, "it", silent=0.5)
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "sleep 61.7351" not in running


def test_a_child_may_say_for_as_long_as_it_likes_that_it_goes_on() -> None:
    def goes_on(stage: Callable[[str], None]) -> str:
        for i in range(5):
            time.sleep(0.3)
            stage(f"in step {i}")
        return "done"

    assert in_child(goes_on, "it", silent=0.6) == "done"


def test_what_somebody_prints_is_seen_of_training_and_not_of_the_rehearsal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def prints(net: Net, out: Tensor) -> Tensor:
        if os.getpid() != PARENT:
            print("in the child", len(out))
        return out

    train(tmp_path / "run", Net(prints))
    seen = capfd.readouterr().out.splitlines()
    assert seen, "each client trains in a process of its own, whose output is that of the program"
    train(tmp_path / "copies", Net(prints), run={"isolation": "copy"})
    assert "in the child" not in "".join(capfd.readouterr())


def test_a_lock_that_another_thread_holds_while_the_child_is_forked() -> None:
    """A progress bar's thread may hold the console's; who prints in the child would wait for it for ever."""
    lock, held = threading.Lock(), threading.Event()

    class Console:
        def write(self, text: str) -> int:
            with lock:
                return len(text)

        def flush(self) -> None:
            pass

    def holding() -> None:
        with lock:
            held.set()
            time.sleep(2)

    thread = threading.Thread(target=holding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", Console())
        thread.start()
        held.wait()
        assert in_child(lambda stage: print("a line"), "it", silent=1) is None
    thread.join()


def states() -> list[Any]:
    _, words, *rest = np.random.get_state()  # noqa: NPY002 : what is looked at
    return [random.getstate(), words.tolist(), rest, torch.get_rng_state().tolist(), torch.get_num_threads()]


@pytest.mark.parametrize("forks", [True, False])
def test_the_rehearsal_leaves_nothing_behind(forks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "can_fork", lambda: forks)
    monkeypatch.setattr(child_process, "can_fork", lambda: forks)
    backward: list[int] = []
    for owner, name in ((torch.autograd, "grad"), (torch.Tensor, "backward")):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, plain=plain, **more: backward.append(1) or plain(*given, **more))

    def drawing(net: Net, out: Tensor) -> Tensor:
        return out + 0 * torch.rand(1) * random.random() * np.random.rand()  # noqa: NPY002

    seen: list[Any] = []

    def watched(*given: Any, **more: Any) -> Any:
        before = states()
        model, local = rehearsal.rehearsed(*given, **more)
        seen.append((before == states(), len(backward), model))
        start = {name: value.clone() for name, value in net.state_dict().items()}
        assert all(torch.equal(value, start[name]) for name, value in model.module.state_dict().items())
        return model, local

    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Net(drawing))
    monkeypatch.setattr("fedveil.experiment.run.rehearsed", watched)
    train(tmp_path / "run", net)
    same, passes, _ = seen[0]
    assert same
    assert (passes == 0) == forks, "a backward pass in this process makes later forks hang"


def test_where_no_child_can_be_forked_the_words_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for forks in (True, False):
        monkeypatch.setattr(rehearsal, "can_fork", lambda forks=forks: forks)
        monkeypatch.setattr(child_process, "can_fork", lambda forks=forks: forks)
        with pytest.raises(ConfigError, match="the table") as refused:
            train(tmp_path / "run", Net(looks_up))
        told.append(str(refused.value))
    assert told[0] == told[1]


# --- scores, states, methods ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with forgotten_after(TASKS, METHODS):
        yield


def task_with(**functions: Any) -> str:
    """A task of one's own, right but for these functions; its name."""
    body: dict[str, Any] = {
        "__module__": __name__,
        "__annotations__": {"name": str},
        "name": "own-task",
        "metrics": (fv.Column("right", share=True, better="higher"),),
        "losses": lambda self, output, target: nn.functional.cross_entropy(output, target, reduction="none"),
        "scores": lambda self, output, target: {"right": float((output.argmax(1) == target).double().mean())},
        "outputs": lambda self, info: info.classes,
    }
    annotations: dict[str, Any] = {"name": str, "metrics": ClassVar}
    kind = type("OwnTask", (fv.Task,), body | {"__annotations__": annotations} | functions)
    fv.register_task(kind)
    return "own-task"


def one_client_only(self: Any, offsets: Any, *evidence: Tensor) -> list[float | None]:
    raise ValueError("a score of one client is not defined")


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("functions", "sections", "words"),
    [
        ({"scores": lambda *given: 1 / 0}, {}, rf"'own-task' fails on examples.*ZeroDivisionError.*{HERE}"),
        (
            {"client_scores": one_client_only},
            {"data": {"client_test_fraction": 0.3}},
            rf"failed in the scores: ValueError: a score of one client is not defined {HERE}",
        ),
        (
            {"client_scores": one_client_only},
            {"data": {"client_test_fraction": 0.3}, "training": {"measure_trained": True}},
            "failed in the scores: ValueError: a score of one client is not defined",
        ),
        (
            {"client_scores": one_client_only},
            {"data": {"client_test_fraction": 0.3}, "privacy": {"evaluation": {"share": 0.1, "examples": 5}}},
            "failed in local training on 4 examples: ValueError: a score of one client is not defined",
        ),
    ],
)
@pytest.mark.parametrize("engine", ["inline", "pool", "batched"])
def test_scores_that_cannot_be_computed(
    functions: Any, sections: dict[str, Any], words: str, engine: str, tmp_path: Path
) -> None:
    name = task_with(**functions)
    with pytest.raises(ConfigError, match=words):
        train(tmp_path / "run", Net(), engine, task=name, **sections)
    assert not (tmp_path / "run").exists()


def test_a_right_task_of_ones_own_trains(tmp_path: Path) -> None:
    result = train(tmp_path / "run", Net(), task=task_with(), data={"client_test_fraction": 0.3})
    assert 0 <= result.score <= 1


@dataclass(frozen=True)
class Keeps(Policy):
    """A policy that keeps what no checkpoint can hold, from the first release on."""

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        return gaussian_plan(s, 0.5)

    def observe(self, s: Setting, state: State, upload: Upload) -> State:
        return {"seen": lambda: upload}


class Keeping(MethodConfig):
    name: Literal["keeping"] = "keeping"

    def release(self, s: Setting) -> Release:
        return Keeps()


class Failing(SumServer):
    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, Tensor]:
        raise LookupError("no upload of client 17")


class Aggregating(Keeping):
    """A method that cannot make a step of what was released."""

    name: Literal["aggregating"] = "aggregating"  # type: ignore[assignment]

    def server(self, s: Setting) -> SumServer:
        return Failing()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Keeping, "the state at .*seen is a function, which cannot be saved"),
        (Aggregating, rf"failed in the server's step: LookupError: no upload of client 17 {HERE}"),
    ],
)
@pytest.mark.parametrize("engine", ["inline", "pool", "batched"])
def test_methods_that_cannot_finish_a_round(method: type[Keeping], words: str, engine: str, tmp_path: Path) -> None:
    register(method)
    with pytest.raises(FedveilError, match=words):
        train(tmp_path / "run", Net(), engine, level={**CLIENT, "method": method()})
    assert not (tmp_path / "run").exists()


class Locked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Any:
        with self.lock:
            return super().forward(x)


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ["inline", "pool", "stacked", "batched"])
def test_what_cannot_be_copied_trains_where_no_copy_is_needed(engine: str, tmp_path: Path) -> None:
    assert (train(tmp_path / "run", Locked, engine).path / "model.safetensors").exists()


class Extra(Net):
    """A state that is no tensor, which a checkpoint of fedveil does not need."""

    def get_extra_state(self) -> Any:
        return lambda: self

    def set_extra_state(self, state: Any) -> None:
        pass


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ["inline", "pool", "stacked", "batched"])
def test_a_state_that_no_file_can_hold_does_not_matter_where_none_has_to(engine: str, tmp_path: Path) -> None:
    assert (train(tmp_path / "run", Extra(), engine).path / "model.safetensors").exists()


# --- half precision ---------------------------------------------------------------------------------------------------


def autocast(net: Net, out: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.relu(out) @ torch.eye(3)


HALF: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "autocast": autocast,
    "half": lambda net, out: out.half(),
    "bfloat16": lambda net, out: out.bfloat16(),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("engine", ["inline", "pool", "stacked", "batched"])
def test_outputs_in_half_precision_are_trained_and_scored_in_float32(half: str, engine: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net(HALF[half])
    more = {"data": {"client_test_fraction": 0.3}, "training": {"measure_trained": True}}
    result = train(tmp_path / "run", net, engine, **more)
    assert not (result.path / "private" / "failures.csv").exists()
    whole = data()
    module, x, y = result.model.module.eval(), torch.from_numpy(whole.x_test), torch.from_numpy(whole.y_test)
    with torch.no_grad():
        output = module(x).float()
    assert result.scores["loss"] == pytest.approx(float(nn.functional.cross_entropy(output, y)), rel=1e-6)
    assert result.score == float((output.argmax(1) == y).double().mean())


@pytest.mark.parametrize("half", HALF)
def test_gradients_of_single_examples_in_half_precision(half: str, tmp_path: Path) -> None:
    """A step of DP-SGD without noise is the mean of clipped gradients whose loss was computed in float32."""
    torch.manual_seed(0)
    net, whole, clip = Net(HALF[half]), data(), 0.05
    config = fv.configure(
        model=net,
        method="fedavg",
        training={
            "rounds": 1,
            "local": "dp-sgd",
            "local_steps": 1,
            "batch_size": 24,
            "example_clip": clip,
            "optimizer": {"name": "sgd", "lr": 1.0},
        },
        privacy={"unit": "record", "noise_multiplier": 0.0},
        run={"engine": "inline"},
    )
    one = fv.from_arrays(whole.x_train, whole.y_train, client=np.zeros(24, int), test=(whole.x_test, whole.y_test))
    trained = fv.train(config, tmp_path / "run", data=one).model.vector
    parameters = list(net.parameters())
    total = torch.zeros_like(trained)
    for x, y in zip(torch.from_numpy(whole.x_train), torch.from_numpy(whole.y_train), strict=True):
        loss = nn.functional.cross_entropy(net(x[None]).float(), y[None])
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])
        total += gradient * min(1.0, clip / float(gradient.norm()))
    start = torch.cat([p.detach().reshape(-1) for p in parameters])
    assert float((trained - (start - total / 24)).norm()) <= 1e-2 * float((total / 24).norm())


# --- what is fedveil's own passes -------------------------------------------------------------------------------------

RUNS = dict(every_method())


@pytest.mark.few(6)
@pytest.mark.parametrize("name", covering(RUNS))
def test_a_round_of_every_built_in_method_can_be_rehearsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it may be left out where all is fedveil's own, and refuses no method that somebody derives from one."""
    monkeypatch.setattr(rehearsal, "is_user_defined", lambda method: True)
    rehearsed(RUNS[name])


@pytest.mark.parametrize(
    ("name", "level"), [*((name, "client") for name in SECTIONS), *((name, "record") for name in BY_EXAMPLE)]
)
def test_a_round_of_every_built_in_task_can_be_rehearsed(name: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "is_user_defined", lambda method: True)
    configuration = small(name, level=level, training={"measure_trained": level == "client"})
    rehearsal.rehearsed(*opened(configuration, made(name)))


@pytest.mark.parametrize("model", ["linear", nn.Linear(4, 3)], ids=["built in", "own"])
@pytest.mark.parametrize("setup", [CLIENT, {"method": {"name": "fedavg"}}], ids=["private", "not private"])
def test_a_limit_that_no_update_keeps_is_known_before(model: Any, setup: dict[str, Any], tmp_path: Path) -> None:
    limited = fv.configure(**setup, training={"rounds": 1, "max_update_norm": 1e-6}, model=model)
    with pytest.raises(ConfigError, match=r"every update was discarded: .* above training\.max_update_norm = 1e-06"):
        fv.train(limited, tmp_path / "run", data=data())
    assert not (tmp_path / "run").exists()


COX: dict[str, Any] = {"task": {"name": "survival", "likelihood": "cox"}}
RELATIVE = {"server_optimizer": {"relative_to_clip": True}, "batch_clip": 1.0}
SERVER = {"privacy": {"view": "server"}, "training": RELATIVE}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no clip of whole updates": (SERVER | {"method": {"name": "fed-addp", "variant": "published"}}, "relative_to_clip"),
    "nor with dpa-ldp": (SERVER | {"method": {"name": "dpa-ldp", "variant": "published"}}, "relative_to_clip"),
    "participations of a sum": ({"privacy": {"view": "aggregate", "max_participations": 2}}, "max_participations"),
    "decay": ({"method": {"name": "fedglp-adp"}, "training": {"optimizer": {"weight_decay": 0.1}}}, "weight_decay"),
    "no tests": ({"training": {"measure_trained": True}}, "measure_trained"),
    "personal models": ({"method": {"name": "fed-dpa"}, "training": {"measure_trained": True}}, "measure_trained"),
    "a time-out": ({"training": {"client_timeout": 10.0}, "run": {"engine": "inline"}}, "inline cannot interrupt a client"),
    "no such engine": ({"run": {"engine": "pol"}}, "did you mean 'pool'"),
    "no loss of one example": (COX | {"method": {"name": "fed-dpa"}}, "single examples"),
    "nor here": (COX | {"method": {"name": "fed-addp", "variant": "published"}}, "single examples"),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_certify_refuses_what_train_refuses(refused: str, tmp_path: Path) -> None:
    """The configuration alone tells, so nothing is made and nothing is charged."""
    sections, words = REFUSED[refused]
    table = data()
    if "task" in sections:
        times = np.stack([np.arange(1.0, 25.0), np.arange(24) % 2], 1).astype("float32")
        table = fv.from_arrays(table.x_train, times, client=np.arange(24) % 3, test=(table.x_train[:6], times[:6]))
    made = {"method": CLIENT["method"], **sections, "privacy": CLIENT["privacy"] | sections.get("privacy", {})}
    config = fv.configure(**{**made, "model": "linear", "training": {"rounds": 3, **sections.get("training", {})}})
    for refuse in (lambda: fv.certify(config, data=table), lambda: fv.train(config, tmp_path / "run", data=table)):
        with pytest.raises(ConfigError, match=words):
            refuse()
    assert not (tmp_path / "run").exists()
