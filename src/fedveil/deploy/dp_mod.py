"""A mod for clients of an existing Flower app: a train function's update is released only through the door.

Flower gives a mod neither its app nor its position in it. Both are found on the call stack.

A folder is the lifetime of one client, whatever its node is called. Only the nodes of a simulation, which Flower numbers by their
part of the data, have several lifetimes in one folder.

    app = ClientApp(mods=[dp_mod(clip=1.0, epsilon=8.0, delta=1e-5, rounds=10, ledger="~/fedveil")])

This is the server view: the update is clipped and noised here, and charged to the client's own ledger before the reply. From the
train function's reply only the floating-point arrays are read. Names, order, shapes and types are those of the instruction, every
client has weight 1, and the reply's metadata are written before training begins. If the mod is first in the list of a whole
app, nothing else of the app can answer; otherwise the client's log names what can.
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
from fedveil.deploy.app_arrays import UNTOUCHED, AppArrays, Kind, not_constant, unfit
from fedveil.errors import BudgetExhausted, ConfigError, FedveilError, LedgerError, UpdateRefused
from fedveil.ledger.files import head_path, owner_only, owner_only_folder, read_head, replace_whole, was_begun
from fedveil.ledger.population_budget import lifetime_budget
from fedveil.methods.base import gaussian_plan
from fedveil.platforms.releaser import ITSELF, federation_setting, positive_number
from fedveil.release.array_door import ArrayDoor
from fedveil.release.noise import Randomness

if TYPE_CHECKING:
    from fedveil.deploy.app_arrays import Floats, Kinds
    from fedveil.ledger.budgeted_ledger import BudgetedLedger
    from fedveil.mechanism.plan import Plan


@dataclass(frozen=True)
class Surroundings:
    """Position of a mod in its app.

    Args:
        outside: names of code that handles a reply after the mod. within: whether the mod is called inside another of its kind.
        bare: names of the app's functions that are registered without the mod.
    """

    outside: tuple[str, ...] = ()
    within: bool = False
    bare: tuple[str, ...] = ()

    @classmethod
    def of(cls, frame: FrameType | None, mod: type) -> Surroundings:
        """Return the position of a mod, from the frame that called it; empty if no ClientApp did."""
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
    """Yield the mods that Flower wrapped around a function, outermost first."""
    while (cells := _closure(function)).keys() >= {"_mod", "_ffn"}:
        yield cells["_mod"]
        function = cells["_ffn"]


def _closure(function: Any) -> dict[str, Any]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return {name: cell.cell_contents for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False)}


_OWNER = "lifetime"
"""File that names the owner of the folder's lifetime."""
_STATE = "fedveil"
"""Record in Flower's state of a node, which lasts for a run."""
_ANSWERED: dict[Path, dict[int, tuple[str, Any]]] = {}
"""Nodes that this process has answered for, by folder: their names, and into how many parts the data are divided."""


@dataclass(frozen=True)
class AppFolder:
    """A client's folder, and the name of its lifetime in it."""

    folder: Path
    name: str

    @classmethod
    def of(cls, folder: Path, context: Any) -> AppFolder:
        """Return the folder and lifetime of a node.

        Raises:
            ConfigError: the folder is the lifetime of another client. LedgerError: it has lost charges of this node in this run.
        """
        part = context.node_config.get("partition-id")
        made = cls(folder, "client" if part is None else f"client-{int(part)}")
        alone = not made._is_simulated(int(context.node_id), context.node_config.get("num-partitions"))
        if alone and not was_begun(made.path) and (owner := made._owner()) != made.name:
            raise ConfigError(
                f"{folder} is the lifetime of one client, kept as {owner}, and this node would begin another one, {made.name}; "
                f"what has left from this folder counts under any name: start the node with the partition-id that it had (with "
                f"none if it had none); another client of this machine runs under an account, or a HOME, of its own"
            )
        charged = int(dict(context.state.get(_STATE, {})).get(str(made.path), 0))
        if charged and (not head_path(made.path).exists() or read_head(made.path)[0] < charged):
            raise LedgerError(
                f"{made.path} has lost releases of this run, or is gone: restore it, because what was released still counts"
            )
        return made

    def note(self, context: Any) -> None:
        """Store at the node, for this run, how many releases the lifetime holds."""
        from flwr.app import ConfigRecord

        with suppress(AttributeError, TypeError):  # the app has replaced the state by something else
            counts = dict(context.state.get(_STATE, {}))
            context.state[_STATE] = ConfigRecord({**counts, str(self.path): read_head(self.path)[0]})

    @property
    def path(self) -> Path:
        """Return the path of the lifetime's ledger."""
        return self.folder / f"{self.name}.sqlite"

    def ledger(self, epsilon: float, delta: float, scope: Scope, run: int) -> BudgetedLedger:
        """Return the ledger to which a run charges its releases; the lifetime is created when first needed."""
        return lifetime_budget(self.path, epsilon, delta, scope).ledger(f"flower/{run}", ITSELF)

    def models(self, run: int) -> list[Kinds]:
        """Return the models that a run has sent before, as first received."""
        stored = self._models().get(str(run), [])
        return [{name: Kind(kind, tuple(shape), *more) for name, (kind, shape, *more) in one.items()} for one in stored]

    def remember(self, run: int, kinds: Kinds) -> None:
        """Store a model as first received."""
        models = self._models()
        models.setdefault(str(run), []).append(dict(kinds))
        owner_only_folder(self.folder)
        replace_whole(self._sent, json.dumps(models).encode(), private=True)

    @property
    def _sent(self) -> Path:
        return self.folder / f"{self.name}.models.json"

    def _models(self) -> dict[str, list[Any]]:
        models: dict[str, list[Any]] = json.loads(self._sent.read_text(encoding="utf-8")) if self._sent.exists() else {}
        return models

    def _owner(self) -> str:
        """Return the name of the lifetime that the folder holds: the first one."""
        owner_only_folder(self.folder)
        ledgers, file = sorted(path.stem for path in self.folder.glob("client*.sqlite")), self.folder / _OWNER
        try:
            with open(file, "x", opener=owner_only, encoding="utf-8") as new:
                new.write(ledgers[0] if ledgers else self.name)
        except FileExistsError:
            pass
        for _ in range(100):  # another process may be writing it
            if owner := file.read_text(encoding="utf-8"):
                return owner
            time.sleep(0.01)
        raise ConfigError(f"{file} is empty: write into it the name of the ledger beside it, without .sqlite")

    def _is_simulated(self, node: int, parts: Any) -> bool:
        """Return whether this is a node of a simulation: each has a different part of the same number of parts."""
        others = _ANSWERED.setdefault(self.folder, {})
        registered = others.setdefault(node, (self.name, parts))
        if registered != (self.name, parts) or parts is None or self.name == "client":
            return False
        return _in_flowers_simulation() or (len(others) > 1 and all(count == parts for _, count in others.values()))


def _in_flowers_simulation() -> bool:
    """Return whether this process is a worker of Flower's simulation; a deployed node has processes of its own."""
    ray = sys.modules.get("ray")
    return "flwr.simulation.ray_transport.ray_actor" in sys.modules and ray is not None and bool(ray.is_initialized())


SCOPE = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.SERVER)
_OTHER = (
    "refused: dp_mod releases what a train function trained, and nothing else: ask its clients for no evaluation and no query"
)
_SPENT = "refused: the budget of this client is spent"
_UNFIT = "refused: the instruction, or the ledger of this client, is not what dp_mod needs; the client's own log has the reason"
_NUMPY_CLIENT = "fitins.parameters"
"""Name of the parameters in an instruction to a NumPyClient or a Client, which Flower calls without the message API."""
_PRECONDITION = 6
"""Flower's error code of a mod that cannot continue."""
_log = logging.getLogger(__name__)
_logged: set[tuple[Path, int, str]] = set()
"""Lines about a run that this process has logged, which each of its nodes would repeat."""

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
    """Return a mod that releases a client's update through the door, with the client's own noise.

    Args:
        clip: C, L2 bound on the update. epsilon, delta: total for all releases of this client, over its lifetime. rounds: number
            of these releases, which determines the noise.
        ledger: the client's folder for its ledger, an absolute path or one that begins with ~.
        weight: key of the metric by which the server's strategy weighs clients. untouched: as in `AppArrays`.

    Raises:
        ConfigError: a number is impossible, or the path is relative.
    """
    folder = absolute_path("ledger", ledger)
    numbers = {"clip": clip, "epsilon": epsilon, "delta": delta}
    clip, epsilon, delta = (positive_number(key, value) for key, value in numbers.items())
    plan = gaussian_plan(federation_setting(clip, epsilon, delta, rounds, 1, scope=SCOPE), clip)
    return DpMod(plan, epsilon, delta, folder, weight, tuple(untouched))


def absolute_path(key: str, path: str | Path) -> Path:
    """Return an absolute path, which means the same wherever Flower starts an app.

    Raises:
        ConfigError: it is relative.
    """
    absolute = Path(path).expanduser()
    if not absolute.is_absolute():
        raise ConfigError(
            f"{key} = '{path}': give an absolute path or one with ~, since Flower starts apps in folders of its own"
        )
    return absolute


@dataclass(frozen=True)
class DpMod:
    """Mod made by `dp_mod`; it can be pickled, as a mod must be to reach a worker."""

    plan: Plan
    epsilon: float
    delta: float
    folder: Path
    weight: str
    untouched: tuple[str, ...]

    def __call__(self, message: Any, context: Any, call_next: Train) -> Any:
        """Return the reply with the release, or a refusal whose text does not depend on the client's data."""
        from flwr.app import Message, RecordDict

        around = Surroundings.of(sys._getframe(1), DpMod)
        if around.within:
            return call_next(message, context)  # the outer one releases and charges
        if message.metadata.message_type.partition(".")[0] != "train":
            return _refusal(message, _OTHER)
        reply, refusals = Message(RecordDict(), reply_to=message), {text: _refusal(message, text) for text in (_SPENT, _UNFIT)}
        ledger = None
        try:
            name, record = _instructed(message.content)
            run, round, folder = int(context.run_id), _round(message.content), AppFolder.of(self.folder, context)
            earlier = folder.models(run)
            arrays = AppArrays.of(record, self.untouched, earlier, late=round > 0)
            if first := arrays.kinds not in earlier:
                self._begin(run, arrays, around)
            ledger = folder.ledger(self.epsilon, self.delta, SCOPE, run)
            door = ArrayDoor(self.plan, arrays.layout, SCOPE, "flower", ledger, Randomness(0))
            if not door.admits(ITSELF):
                raise BudgetExhausted(
                    f"{folder.path}: nothing is left for a release; all nodes, runs and apps that use this file share what it "
                    f"allows"
                )
            content = _trained_content(_sent(message, name, arrays), context, call_next)
            if first:
                refused = {n: arrays.kinds[n]._replace(released=None) for n in _refilled(arrays, content)}
                folder.remember(run, {**arrays.kinds, **refused})  # a second reply would reveal more
                if refused:
                    raise not_constant(list(refused))
            released = door.release(door.encode(_moved(arrays, content)), ITSELF, round)
            folder.note(context)
        except BudgetExhausted as problem:
            _log.warning("refused: %s", problem)
            return refusals[_SPENT]
        except Exception as problem:  # its text stays here
            _log.warning("refused: %s", problem, exc_info=not isinstance(problem, FedveilError))
            return refusals[_UNFIT]
        finally:
            if ledger is not None:
                ledger.close()
        reply.content = _answer(name, arrays.moved(released), self.weight)
        return reply

    def _begin(self, run: int, arrays: AppArrays, around: Surroundings) -> None:
        """Log once per run what a reader of this client's log must know.

        Raises:
            ConfigError: the app has train functions without the mod.
        """
        if trains := [name for name in around.bare if name.startswith("train.")]:
            raise ConfigError(
                f"{', '.join(trains)}: registered without dp_mod, so their updates would be sent without noise: put dp_mod "
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
        if arrays.caveat:
            self._say(run, arrays.caveat)
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
        if (self.folder, run, line) not in _logged:
            _logged.add((self.folder, run, line))
            _log.warning("%s", line)


def _trained_content(message: Any, context: Any, call_next: Train) -> Any:
    """Return the content of a train function's reply, or None if it failed."""
    try:
        return call_next(message, context).content
    except KeyboardInterrupt:
        raise
    except BaseException:
        _log.warning("training failed, and a noised zero is released", exc_info=True)
        return None


def _moved(arrays: AppArrays, content: Any) -> Floats:
    """Return the update, or zero if it may not be released."""
    if content is None:
        return arrays.nothing
    try:
        update = arrays.update(content)
        problem = unfit(update)
    except Exception as misfit:
        problem = str(misfit)
    if problem:
        _log.warning(
            "%s; a noised zero is released in its place, and charged (the model that came has norm %.3g)", problem, arrays.norm
        )
        return arrays.nothing
    return update


def _refilled(arrays: AppArrays, content: Any) -> list[str]:
    """Return non-finite arrays that training changed; none if the reply does not fit."""
    try:
        return [] if content is None else arrays.refilled(content)
    except Exception:
        return []


def _instructed(content: Any) -> tuple[str, Any]:
    """Return the name and the one ArrayRecord of an instruction."""
    records = list(content.array_records.items())
    if len(records) != 1:
        raise UpdateRefused(f"the instruction has {len(records)} ArrayRecords, and dp_mod needs one")
    ((name, record),) = records
    return name, record


def _answer(name: str, record: Any, weight: str) -> Any:
    """Return the content of a reply to an instruction whose ArrayRecord has that name: the release, and weight 1."""
    from flwr.app import ConfigRecord, MetricRecord, RecordDict

    if name != _NUMPY_CLIENT:
        return RecordDict({name: record, "metrics": MetricRecord({weight: 1})})
    whole = {"parameters": record, "num_examples": MetricRecord({"num_examples": 1}), "metrics": ConfigRecord()}
    whole["status"] = ConfigRecord({"code": 0, "message": ""})
    return RecordDict({f"fitres.{key}": value for key, value in whole.items()})


def _sent(message: Any, name: str, arrays: AppArrays) -> Any:
    """Return the message for the train function, with integers restored that a strategy turned into floats."""
    from flwr.app import RecordDict

    if all(array.dtype == str(arrays.arrays[key].dtype) for key, array in message.content[name].items()):
        return message
    restored = copy(message)  # the strategy may have put the same content into other messages
    restored.content = RecordDict({**message.content, name: arrays.record})
    return restored


def _round(content: Any) -> int:
    """Return the server's round number from 0, used only to label the ledger's row."""
    numbers = [config.get("server-round") for config in content.config_records.values()]
    return next((n - 1 for n in numbers if type(n) is int and 1 <= n < 2**62), 0)


def _refusal(message: Any, reason: str) -> Any:
    from flwr.app import Error, Message

    return Message(Error(code=_PRECONDITION, reason=reason), reply_to=message)
