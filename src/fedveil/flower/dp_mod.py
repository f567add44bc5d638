"""A mod for clients of an existing Flower app: what a train function answers leaves through the door, and nothing else of it.

    app = ClientApp(mods=[dp_mod(clip=1.0, epsilon=8.0, delta=1e-5, rounds=10, ledger="~/fedveil")])

The server view: the update is clipped and noised here, and charged to the client's own ledger before it is answered. Of the reply
of the train function nothing but the floating-point arrays is looked at; names, order, shapes and types are those of the
instruction, the weight of every client is 1, and the reply's own metadata are written before training begins. First in the list
of a whole app, nothing else of the app can answer; elsewhere, what can is named in the client's log.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.accounting.types import Adjacency, Scope, Unit, View
from fedveil.errors import BudgetExhausted, ConfigError, FedveilError, UpdateRefused
from fedveil.flower.app_arrays import UNTOUCHED, AppArrays, not_constant
from fedveil.flower.app_folder import ITSELF, AppFolder
from fedveil.flower.app_surroundings import Surroundings
from fedveil.methods.base import Setting, gaussian_plan
from fedveil.methods.method_registry import method_from
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.training.local import LocalSpec
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.mechanism.plan import Plan

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
