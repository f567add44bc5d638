"""A mod for clients of an existing Flower app: the answer of a train function leaves through the door alone.

Flower gives a mod neither its app nor its place in it. Both are on the call stack.

A folder is the lifetime of one client, whatever its node is called. Only the nodes of a simulation, which Flower numbers by the
part of the data that each has, keep several lifetimes in one folder.

    app = ClientApp(mods=[dp_mod(clip=1.0, epsilon=8.0, delta=1e-5, rounds=10, ledger="~/fedveil")])

The server view: the update is clipped and noised here, and charged to the client's own ledger before it is answered. Of the reply
of the train function nothing but the floating-point arrays is looked at; names, order, shapes and types are those of the
instruction, the weight of every client is 1, and the reply's own metadata are written before training begins. First in the list
of a whole app, nothing else of the app can answer; elsewhere, what can is named in the client's log.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fedveil.accounting.types import Adjacency, Scope, Unit, View
from fedveil.deploy.app_arrays import UNTOUCHED, AppArrays, Kind, not_constant
from fedveil.errors import BudgetExhausted, ConfigError, FedveilError, LedgerError, UpdateRefused
from fedveil.ledger.files import head_path, owner_only, owner_only_folder, read_head, replace_whole
from fedveil.ledger.population_budget import lifetime_budget
from fedveil.methods.base import Setting, gaussian_plan
from fedveil.methods.method_registry import method_from
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.training.local import LocalSpec
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.deploy.app_arrays import Kinds
    from fedveil.ledger.budgeted_ledger import BudgetedLedger
    from fedveil.mechanism.plan import Plan


@dataclass(frozen=True)
class Surroundings:
    """What surrounds a mod.

    Args:
        outside: names of what handles a reply after the mod. within: whether the mod is called inside another of its kind.
        bare: names of the app's functions that are registered without the mod.
    """

    outside: tuple[str, ...] = ()
    within: bool = False
    bare: tuple[str, ...] = ()

    @classmethod
    def of(cls, frame: FrameType | None, mod: type) -> Surroundings:
        """Those of a mod, from the frame that called it; nothing where no ClientApp did."""
        from flwr.clientapp import ClientApp

        called, within, outside = mod.__call__.__code__, False, []
        while frame is not None and frame.f_code is not ClientApp.__call__.__code__:
            within |= frame.f_code is called
            if not (frame.f_code.co_name == "new_ffn" and str(frame.f_globals.get("__name__")).startswith("flwr.")):
                outside.append(frame.f_code.co_qualname)
            frame = frame.f_back
        if frame is None:
            return cls()
        functions = getattr(frame.f_locals.get("self"), "_registered_funcs", {})
        bare = [name for name, function in functions.items() if not any(isinstance(one, mod) for one in _mods(function))]
        return cls(tuple(outside), within, tuple(bare))


def _mods(function: Any) -> Iterator[Any]:
    """The mods that Flower put round a function, outermost first."""
    while (cells := _closure(function)).keys() >= {"_mod", "_ffn"}:
        yield cells["_mod"]
        function = cells["_ffn"]


def _closure(function: Any) -> dict[str, Any]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return {name: cell.cell_contents for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False)}


ITSELF = 0
"""The number under which a client counts itself."""
_OWNER = "lifetime"
"""The file that says whose lifetime the folder keeps."""
_STATE = "fedveil"
"""The record of Flower's state of a node, which lasts for a run."""
_ANSWERED: dict[Path, dict[int, tuple[str, Any]]] = {}
"""Of each folder the nodes that this process has answered for: their names, and how many parts the data have."""


@dataclass(frozen=True)
class AppFolder:
    """A client's folder, and the name of its lifetime in it."""

    folder: Path
    name: str

    @classmethod
    def of(cls, folder: Path, context: Any) -> AppFolder:
        """That of a node.

        Raises:
            ConfigError: the folder is the lifetime of another one. LedgerError: it has lost what this node charged in this run.
        """
        part = context.node_config.get("partition-id")
        found = cls(folder, "client" if part is None else f"client-{int(part)}")
        alone = not found._is_simulated(int(context.node_id), context.node_config.get("num-partitions"))
        if alone and not (found.path.exists() or head_path(found.path).exists()) and (owner := found._owner()) != found.name:
            raise ConfigError(
                f"{folder} is the lifetime of one client, kept as {owner}, and this node would begin another one, {found.name}; "
                f"what has left from this folder counts under any name: start the node with the partition-id that it had (with "
                f"none if it had none); another client of this machine runs under an account, or a HOME, of its own"
            )
        charged = int(dict(context.state.get(_STATE, {})).get(str(found.path), 0))
        if charged and (not head_path(found.path).exists() or read_head(found.path)[0] < charged):
            raise LedgerError(
                f"{found.path} has lost releases that left in this run, or is gone: put back what was there, which still counts"
            )
        return found

    def note(self, context: Any) -> None:
        """Keep at the node, for this run, how many releases the lifetime holds."""
        from flwr.app import ConfigRecord

        with suppress(AttributeError, TypeError):  # a state that the app has replaced by something else
            held = dict(context.state.get(_STATE, {}))
            context.state[_STATE] = ConfigRecord({**held, str(self.path): read_head(self.path)[0]})

    @property
    def path(self) -> Path:
        """The ledger of the lifetime."""
        return self.folder / f"{self.name}.sqlite"

    def ledger(self, epsilon: float, delta: float, scope: Scope, run: int) -> BudgetedLedger:
        """Where a run charges its releases; the lifetime is made when first asked for."""
        return lifetime_budget(self.path, epsilon, delta, scope).ledger(f"flower/{run}", ITSELF)

    def models(self, run: int) -> list[Kinds]:
        """The models that a run has sent before, as they were the first time."""
        found = self._models().get(str(run), [])
        return [{name: Kind(kind, tuple(shape), *more) for name, (kind, shape, *more) in one.items()} for one in found]

    def remember(self, run: int, kinds: Kinds) -> None:
        """Keep a model as it is sent the first time."""
        models = self._models()
        models.setdefault(str(run), []).append(dict(kinds))
        owner_only_folder(self.folder)
        replace_whole(self._sent, json.dumps(models).encode(), private=True)

    @property
    def _sent(self) -> Path:
        return self.folder / f"{self.name}.models.json"

    def _models(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = json.loads(self._sent.read_text(encoding="utf-8")) if self._sent.exists() else {}
        return found

    def _owner(self) -> str:
        """Whose lifetime the folder keeps: who came first."""
        owner_only_folder(self.folder)
        there, file = sorted(path.stem for path in self.folder.glob("client*.sqlite")), self.folder / _OWNER
        try:
            with open(file, "x", opener=owner_only, encoding="utf-8") as new:
                new.write(there[0] if there else self.name)
        except FileExistsError:
            pass
        for _ in range(100):  # another process may be writing it
            if owner := file.read_text(encoding="utf-8"):
                return owner
            time.sleep(0.01)
        raise ConfigError(f"{file} is empty: write into it the name of the ledger beside it, without .sqlite")

    def _is_simulated(self, node: int, parts: Any) -> bool:
        """Whether this is one of the nodes of a simulation: each has its own part of the same number of parts."""
        others = _ANSWERED.setdefault(self.folder, {})
        own = others.setdefault(node, (self.name, parts))
        if own != (self.name, parts) or parts is None or self.name == "client":
            return False
        return _in_flowers_simulation() or (len(others) > 1 and all(there == parts for _, there in others.values()))


def _in_flowers_simulation() -> bool:
    """Whether this process is a worker of Flower's simulation; a deployed node has processes of its own."""
    ray = sys.modules.get("ray")
    return "flwr.simulation.ray_transport.ray_actor" in sys.modules and ray is not None and bool(ray.is_initialized())


SCOPE = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.SERVER)
_OTHER = (
    "refused: dp_mod releases what a train function trained, and nothing else: ask its clients for no evaluation and no query"
)
_SPENT = "refused: the budget of this client is spent"
_UNFIT = "refused: the instruction, or the ledger of this client, is not what dp_mod needs; the client's own log has the reason"
_PRECONDITION = 6
"""Flower's error code of a mod that cannot go on."""
_log = logging.getLogger(__name__)
_said: set[tuple[Path, int, str]] = set()
"""What this process has said of a run, which each of its nodes would say again."""

Train = Callable[[Any, Any], Any]


def dp_mod(
    *,
    clip: float,
    epsilon: float,
    delta: float,
    rounds: int,
    ledger: str | Path,
    weight: str = "num-examples",
    untouched: Sequence[str] = UNTOUCHED,
) -> DpMod:
    """A mod that releases a client's update through the door, with noise of its own.

    Args:
        clip: C, L2 bound on the update. epsilon, delta: of all that leaves this client, over its lifetime. rounds: how many
            releases that is; the noise follows.
        ledger: the client's folder for its ledger, an absolute path or one that begins with ~.
        weight: key of the metric by which the server's strategy weighs clients. untouched: as in `AppArrays`.

    Raises:
        ConfigError: an impossible number, or a relative path.
    """
    folder = absolute_path("ledger", ledger)
    if not (epsilon > 0 and math.isfinite(epsilon) and 0 < delta < 1 and rounds == int(rounds) >= 1):
        raise ConfigError(
            f"epsilon = {epsilon}, delta = {delta}, rounds = {rounds}: need epsilon > 0, delta in (0, 1), rounds >= 1"
        )
    method = method_from({"name": "dp-fedavg", "clip": clip})
    setting = Setting(1, 1, int(rounds), "fixed", LocalSpec(), Layout(("model",), ((1,),)), 1, 1, SCOPE, delta, epsilon)
    plan = gaussian_plan(method.calibrate(setting), clip)
    return DpMod(plan, epsilon, delta, folder, weight, tuple(untouched))


def absolute_path(key: str, path: str | Path) -> Path:
    """A path that means the same wherever Flower starts an app.

    Raises:
        ConfigError: it is relative.
    """
    found = Path(path).expanduser()
    if not found.is_absolute():
        raise ConfigError(
            f"{key} = '{path}': give an absolute path or one with ~, since Flower starts apps in folders of its own"
        )
    return found


@dataclass(frozen=True)
class DpMod:
    """The mod that `dp_mod` makes; it pickles, as a mod must that is sent to a worker."""

    plan: Plan
    epsilon: float
    delta: float
    folder: Path
    weight: str
    untouched: tuple[str, ...]

    def __call__(self, message: Any, context: Any, call_next: Train) -> Any:
        """The reply with what was released, or a refusal of which no word depends on the client's data."""
        from flwr.app import Message, MetricRecord, RecordDict

        around = Surroundings.of(sys._getframe(1), DpMod)
        if around.within:
            return call_next(message, context)  # released, and charged, by the outer one
        if message.metadata.message_type.partition(".")[0] != "train":
            return _refusal(message, _OTHER)
        reply, refusals = Message(RecordDict(), reply_to=message), {text: _refusal(message, text) for text in (_SPENT, _UNFIT)}
        ledger = None
        try:
            name, record = _instructed(message.content)
            run, round, own = int(context.run_id), _round(message.content), AppFolder.of(self.folder, context)
            known = own.models(run)
            arrays = AppArrays.of(record, self.untouched, known, late=round > 0)
            if first := arrays.kinds not in known:
                self._begin(run, arrays, around)
            ledger = own.ledger(self.epsilon, self.delta, SCOPE, run)
            door = Door(arrays.layout, SCOPE, "flower", ledger, Randomness(0))
            if not door.admits(self.plan, ITSELF, round):
                raise BudgetExhausted(
                    f"{own.path}: nothing is left for a release; all nodes, runs and apps that use this file share what it allows"
                )
            content = _answered(_sent(message, name, arrays), context, call_next)
            if first:
                refused = {n: arrays.kinds[n]._replace(released=None) for n in _refilled(arrays, content)}
                own.remember(run, {**arrays.kinds, **refused})  # a second reply would tell more
                if refused:
                    raise not_constant(list(refused))
            upload = door.upload(_moved(door, arrays, content), self.plan, ITSELF, round)
            own.note(context)
        except BudgetExhausted as problem:
            _log.warning("refused: %s", problem)
            return refusals[_SPENT]
        except Exception as problem:  # its words stay here
            _log.warning("refused: %s", problem, exc_info=not isinstance(problem, FedveilError))
            return refusals[_UNFIT]
        finally:
            if ledger is not None:
                ledger.close()
        reply.content = RecordDict({name: arrays.moved(upload.vector), "metrics": MetricRecord({self.weight: 1})})
        return reply

    def _begin(self, run: int, arrays: AppArrays, around: Surroundings) -> None:
        """Say once what a reader of this client's log must know of a run.

        Raises:
            ConfigError: the app has train functions without the mod.
        """
        if trains := [name for name in around.bare if name.startswith("train.")]:
            raise ConfigError(
                f"{', '.join(trains)}: registered without dp_mod, so that what they train would leave without noise: put dp_mod "
                f"first in ClientApp(mods=[...]), and nowhere else"
            )
        std, d = self.plan.noise_std, arrays.layout.dimension
        assert isinstance(std, float)
        if (norm := std * math.sqrt(d)) > self.plan.clip:
            self._say(
                run,
                f"the noise of each release has norm {norm:.3g} ({std:.3g} on each of {d:,} numbers), and an update at most "
                f"{self.plan.clip:g}, the clip; it is what the server's mean over n clients divides by the square root of n",
            )
        if around.outside:
            self._say(
                run,
                f"{', '.join(around.outside)}: outside dp_mod, so that what they add to a reply leaves without noise, and the "
                f"guarantee does not cover it: put dp_mod first in ClientApp(mods=[...])",
            )
        if around.bare:
            self._say(
                run,
                f"{', '.join(around.bare)}: registered without dp_mod, so that what they answer (metrics of evaluation, for one) "
                f"leaves without noise, and the guarantee does not cover it: dp_mod first in ClientApp(mods=[...]) refuses them",
            )

    def _say(self, run: int, line: str) -> None:
        if (self.folder, run, line) not in _said:
            _said.add((self.folder, run, line))
            _log.warning("%s", line)


def _answered(message: Any, context: Any, call_next: Train) -> Any:
    """The content of a train function's reply, or None where there is none."""
    try:
        return call_next(message, context).content
    except KeyboardInterrupt:
        raise
    except BaseException:
        _log.warning("training failed, and a noised zero is released", exc_info=True)
        return None


def _moved(door: Door, arrays: AppArrays, content: Any) -> Tensor:
    """What training moved, or zero where there is nothing that may leave."""
    if content is None:
        return arrays.nothing
    try:
        update = arrays.update(content)
        problem = door.problem(update, {})
    except Exception as misfit:
        problem = str(misfit)
    if problem:
        _log.warning(
            "%s; a noised zero is released in its place, and charged (the model that came has norm %.3g)", problem, arrays.norm
        )
        return arrays.nothing
    return update


def _refilled(arrays: AppArrays, content: Any) -> list[str]:
    """Arrays with NaN or infinite values that training changed; a reply that does not fit tells nothing of them."""
    try:
        return [] if content is None else arrays.refilled(content)
    except Exception:
        return []


def _instructed(content: Any) -> tuple[str, Any]:
    """The one ArrayRecord of an instruction, with its name."""
    records = list(content.array_records.items())
    if any(name.startswith("fitins.") for name, _ in records):
        raise UpdateRefused("the app is one of NumPyClient or Client: dp_mod is for apps of the message API (@app.train)")
    if len(records) != 1:
        raise UpdateRefused(f"the instruction has {len(records)} ArrayRecords, and dp_mod needs one")
    ((name, record),) = records
    return name, record


def _sent(message: Any, name: str, arrays: AppArrays) -> Any:
    """The message as a train function is to see it: integers that a strategy turned into floats are integers again."""
    from flwr.app import RecordDict

    if all(array.dtype == arrays.arrays[key].dtype for key, array in message.content[name].items()):
        return message
    restored = copy(message)  # the strategy may have put the same content into other messages
    restored.content = RecordDict({**message.content, name: arrays.record})
    return restored


def _round(content: Any) -> int:
    """The server's number of the round, by which the ledger's row is labelled, from 0; nothing else depends on it."""
    numbers = [config.get("server-round") for config in content.config_records.values()]
    return next((n - 1 for n in numbers if type(n) is int and 1 <= n < 2**62), 0)


def _refusal(message: Any, reason: str) -> Any:
    from flwr.app import Error, Message

    return Message(Error(code=_PRECONDITION, reason=reason), reply_to=message)
