"""What own code keeps from one call to the next is found wherever its names lead; what it makes anew each time is not."""

from __future__ import annotations

import copy
import functools
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx
from torch import Tensor, nn

import fedveil as fv
from fedveil.errors import ConfigError
from fedveil.training.kept_state import KeptState, has_own_code
from fedveil.training.params import FlatModel

SEEN: list[float] = []
LARGEST = 0.0


class Base(nn.Module):
    """One layer; `keep` writes somewhere what it saw."""

    everything: list[float] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("most", torch.zeros(1))
        self.number, self.log, self.table = 0.0, deque[float](), {"by": {"name": [0.0]}}
        self.array, self.drawn = torch.zeros(2).numpy(), torch.Generator()
        self.older, self.bits = np.random.RandomState(0), np.random.PCG64(0)
        self.sobol = torch.quasirandom.SobolEngine(2)
        self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), patience=0)

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x)
        out: Tensor = self.layer(x) + self.number
        return out

    def keep(self, x: Tensor) -> None: ...


def kept(write: Callable[[Base, Tensor], None]) -> type[Base]:
    return type("Own", (Base,), {"keep": write, "__module__": __name__})


def number(self: Base, x: Tensor) -> None:
    self.number = float(x.max())


def queue(self: Base, x: Tensor) -> None:
    self.log.append(float(x.max()))


def nested(self: Base, x: Tensor) -> None:
    self.table["by"]["name"][0] = float(x.max())


def on_a_layer(self: Base, x: Tensor) -> None:
    self.layer.last = x.detach()


def new_buffer(self: Base, x: Tensor) -> None:
    self.most = x.detach().max()[None]


def past_the_count(self: Base, x: Tensor) -> None:
    self.most.data.fill_(float(x.max()))


def in_an_array(self: Base, x: Tensor) -> None:
    self.array[0] = float(x.max())


def of_a_generator(self: Base, x: Tensor) -> None:
    torch.rand(1, generator=self.drawn)


def of_numpys_older_generator(self: Base, x: Tensor) -> None:
    self.older.normal()


def of_its_bits(self: Base, x: Tensor) -> None:
    self.bits.random_raw()


def of_a_sobol_sequence(self: Base, x: Tensor) -> None:
    self.sobol.draw(1)


def of_a_schedule(self: Base, x: Tensor) -> None:
    self.schedule.step(float(x.max()))


def of_the_class(self: Base, x: Tensor) -> None:
    type(self).everything.append(float(x.max()))


def of_the_module(self: Base, x: Tensor) -> None:
    SEEN.append(float(x.max()))


def through_a_helper(self: Base, x: Tensor) -> None:
    helper(x)


def helper(x: Tensor) -> None:
    global LARGEST
    LARGEST = float(x.max())


def default(self: Base, x: Tensor, log: list[float] = []) -> None:  # noqa: B006
    log.append(float(x.max()))


def of_the_mode(self: Base, x: Tensor) -> None:
    self.eval()


def closure() -> Callable[[Base, Tensor], None]:
    found: list[float] = []

    def keep(self: Base, x: Tensor) -> None:
        found.append(float(x.max()))

    return keep


WRITES = {
    "number": number,
    "log": queue,
    "table['by']['name']|table": nested,
    "layer.last": on_a_layer,
    "most": new_buffer,
    "most ": past_the_count,
    "array": in_an_array,
    "drawn": of_a_generator,
    "older": of_numpys_older_generator,
    "bits": of_its_bits,
    "sobol": of_a_sobol_sequence,
    "schedule": of_a_schedule,
    "Base.everything": of_the_class,
    "global SEEN": of_the_module,
    "global LARGEST": through_a_helper,
    "defaults of default": default,
    "training": of_the_mode,
    "found of closure": closure(),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_a_module_kept_is_named(name: str) -> None:
    model = FlatModel(kept(WRITES[name])())
    model.require_constants()
    model.module(torch.ones(3, 2))
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"model: Own keeps .*({name.strip().replace('[', '.').replace(']', '.')})"):
            model.require_constants()


def test_who_draws_from_a_generator_of_its_own_is_told_from_which_one_to_draw() -> None:
    model = FlatModel(kept(of_numpys_older_generator)())
    model.module(torch.ones(3, 2))
    with pytest.raises(ConfigError, match=r"keeps older from one call to the next.*: draw from the global generator of torch"):
        model.require_constants()


def test_a_generator_without_a_state_is_held_by_whoever_likes() -> None:
    module = Base()
    module.system = random.SystemRandom()  # type: ignore[assignment]
    model = FlatModel(module)
    module.system.random()
    model.require_constants()


def test_what_was_kept_of_public_examples_may_stay() -> None:
    model = FlatModel(kept(number)())
    model.module(torch.ones(3, 2))
    model.remember_constants()
    model.module(torch.ones(3, 2))
    model.require_constants()


def test_training_changes_nothing_that_counts() -> None:
    module = nn.Sequential(kept(lambda self, x: None)(), nn.BatchNorm1d(2), nn.LSTM(2, 3))
    model = FlatModel(module)
    model.vector.add_(1.0)
    model.module[:2](torch.randn(5, 2)).sum().backward()
    torch.func.functional_call(module[2], dict(module[2].named_parameters()), torch.randn(1, 5, 2))
    model.eval()
    model.train()
    model.require_constants()
    other = pickle.loads(pickle.dumps(FlatModel(Base())))
    other.require_constants()
    other.module.number = 1.0
    with pytest.raises(ConfigError, match="keeps number"):
        other.require_constants()


def compared(model: FlatModel) -> bool:
    """Whether a list that hangs on the module may not grow."""
    model.module.log = []  # type: ignore[assignment]
    try:
        model.require_constants()
    except ConfigError:
        return True
    return False


def test_of_a_built_in_network_nothing_is_compared_and_of_all_others_everything() -> None:
    """That all classes are torch's does not say whose functions they call."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.TransformerEncoderLayer(4, 2), nn.LSTM(2, 3))
    assert not has_own_code(net)
    assert compared(FlatModel(copy.deepcopy(net)))
    built_in = FlatModel(copy.deepcopy(net), built_in=True)
    copies = built_in.another(built_in.vector.clone(), built_in.grad.clone()), pickle.loads(pickle.dumps(built_in))
    assert not any(map(compared, (built_in, *copies)))
    assert has_own_code(nn.Sequential(nn.Linear(1, 1), Base()))
    net[0].register_forward_hook(lambda *_: None)
    assert has_own_code(net)


def test_a_hook_that_keeps_is_found() -> None:
    found: list[Any] = []
    net = nn.Linear(2, 2)
    net.register_forward_hook(lambda layer, inputs, output: found.append(inputs))
    model = FlatModel(net)
    model.module(torch.ones(3, 2))
    with pytest.raises(ConfigError, match="keeps found of "):
        model.require_constants()


def a_running_scale() -> Callable[[Tensor], Tensor]:
    found = {"scale": 1.0}

    def scaled(x: Tensor) -> Tensor:
        found["scale"] = 0.9 * found["scale"] + 0.1 * float(x.detach().abs().mean())
        return x / found["scale"]

    return scaled


@torch.fx.wrap
def through_a_graph(x: Tensor) -> Tensor:
    SEEN.append(float(x.detach().max()))
    return x


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(through_a_graph(x))
        return out


class Listed(nn.Module):
    """A container of a class of its own, which keeps on its class."""

    class Parts(list[nn.Module]):
        seen: list[float] = []  # noqa: RUF012

        def through(self, x: Tensor) -> Tensor:
            self.seen.append(float(x.max()))
            return x

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.parts = nn.Linear(4, 4), Listed.Parts()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.parts.through(x))
        return out


def on_a_gradient() -> nn.Module:
    net, found = nn.Linear(4, 4), list[float]()
    net.weight.register_hook(lambda grad: found.append(float(grad.max())))  # type: ignore[no-untyped-call]
    return net


INSIDE_TORCH: dict[str, Callable[[], nn.Module]] = {
    "found of a_running_scale.": lambda: nn.TransformerEncoderLayer(4, 1, 8, activation=a_running_scale(), dropout=0.0),
    "global SEEN": lambda: torch.fx.symbolic_trace(Traced()),
    "Listed.Parts.seen": Listed,
    "found of on_a_gradient": on_a_gradient,
}


@pytest.mark.parametrize("name", INSIDE_TORCH)
def test_what_code_inside_torch_s_own_modules_kept_is_named(name: str) -> None:
    """A function as an attribute, in the generated code of a traced graph, on the class of a container, on a gradient."""
    model = FlatModel(INSIDE_TORCH[name]())
    model.require_constants()
    model.module(torch.ones(3, 4)).sum().backward()
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"keeps .*{name}"):
            model.require_constants()


@pytest.mark.parametrize("kind", [nn.Module, nn.Linear])
def test_a_function_that_was_put_on_a_class_of_torch_s_is_followed(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []
    monkeypatch.setattr(kind, "extra_repr", lambda self: str(found.extend([1.0])))
    model = FlatModel(nn.Linear(4, 4))
    model.require_constants()
    kind.extra_repr(model.module)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="keeps found of "):
        model.require_constants()


def test_a_task_that_keeps_is_found() -> None:
    class Remembering(fv.Task):
        name: str = "remembering"
        level: float = 0.5

        @torch.no_grad()
        def losses(self, output: Tensor, target: Tensor) -> Tensor:
            SEEN.append(float(target.max()))
            return (output[:, 0] - target).abs()

    task = Remembering()
    state = KeptState("task.name = 'remembering'", task)
    state.require_unchanged()
    task.losses(torch.ones(2, 1), torch.ones(2))
    with pytest.raises(ConfigError, match=r"task\.name = 'remembering' keeps global SEEN from one call"):
        state.require_unchanged()


class Slotted:
    """An object of its own, without a dictionary, that leads back to itself."""

    __slots__ = ("me", "value")

    def __init__(self) -> None:
        self.me, self.value = self, 0


def test_objects_and_partial_functions_are_followed() -> None:
    inner = Slotted()
    state = KeptState("it", functools.partial(print, [inner]))
    state.require_unchanged()
    inner.value = 1
    with pytest.raises(ConfigError, match=r"it keeps .*value"):
        state.require_unchanged()


class Hidden:
    """A slot whose name its class changes, as it does with all private names."""

    __slots__ = ("__seen",)

    def __init__(self) -> None:
        self.__seen = 0.0

    def keep(self, x: float) -> None:
        self.__seen = x


def test_a_private_slot_is_found() -> None:
    hidden = Hidden()
    state = KeptState("it", hidden)
    state.require_unchanged()
    hidden.keep(1.0)
    with pytest.raises(ConfigError, match="it keeps _Hidden__seen"):
        state.require_unchanged()


def by_an_import(x: float) -> None:
    import own_box.inner  # type: ignore[import-not-found]

    own_box.inner.SEEN.append(x)


def of_an_import(x: float) -> None:
    from own_box.inner import SEEN

    SEEN.append(x)


def inside_a_package(x: float) -> None:
    own_box.inner.SEEN.append(x)  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize("keep", [by_an_import, of_an_import, inside_a_package])
def test_modules_that_a_function_imports_and_modules_in_modules_are_followed(
    keep: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    box, inner = types.ModuleType("own_box"), types.ModuleType("own_box.inner")
    vars(box).update(inner=inner, __path__=[])
    vars(inner).update(SEEN=[])
    for module in (box, inner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    if keep is inside_a_package:
        monkeypatch.setitem(globals(), "own_box", box)
    state = KeptState("it", keep)
    state.require_unchanged()
    keep(1.0)
    with pytest.raises(ConfigError, match=r"it keeps global own_box\.inner\.SEEN"):
        state.require_unchanged()


def test_a_module_that_is_imported_later_is_no_reason_to_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its content would be new as a whole."""
    (tmp_path / "own_later.py").write_text("SEEN = []\n")
    monkeypatch.syspath_prepend(tmp_path)

    def imports() -> int:
        import own_later  # type: ignore[import-not-found]

        return len(own_later.SEEN)

    state = KeptState("it", imports)
    assert imports() == 0
    state.require_unchanged()
    monkeypatch.delitem(sys.modules, "own_later")


class Cupboards(nn.Module):
    """Places that are easily overlooked; `write` puts something into one of them."""

    def __init__(self, write: Callable[[Cupboards, Tensor], object]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(2, 2), write
        self.own_dict, self.objects = type("Own", (dict,), {})(), np.empty(1, object)
        self.objects[0] = []
        self.append, self.put = [].append, {}.__setitem__
        self.normal = torch.distributions.Normal(torch.zeros(2), 1.0)
        self.optimizer = torch.optim.SGD(self.layer.parameters())

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x)
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize(
    ("write", "where"),
    [
        (lambda self, x: setattr(self.layer.weight, "last", x), "layer.weight.last"),
        (lambda self, x: setattr(self.own_dict, "last", x), "own_dict.last"),
        (lambda self, x: self.objects[0].append(x), r"objects\[0\]"),
        (lambda self, x: self.append(x), "append"),
        (lambda self, x: self.put("last", x), "put"),
        (lambda self, x: self.normal.loc.copy_(x[0]), "normal.loc"),
        (lambda self, x: self.optimizer.state.update(last=x), "optimizer.state"),
    ],
)
def test_places_that_are_easily_overlooked(write: Callable[[Cupboards, Tensor], object], where: str) -> None:
    model = FlatModel(Cupboards(write))
    model.require_constants()
    model.module(torch.ones(3, 2))
    with pytest.raises(ConfigError, match=where):
        model.require_constants()
