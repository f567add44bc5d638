"""A mod for clients of an existing Flower app: what a train function answers leaves through the door, and nothing else of it.

    @app.train(mods=[dp_mod(clip=1.0, epsilon=8.0, delta=1e-5, rounds=10, ledger="~/fedveil")])

The server view: the update is clipped and noised here, and charged to the client's own ledger before it is answered. Of the reply
of the train function nothing but the floating-point arrays is looked at; names, order, shapes and types are those of the
instruction, the weight of every client is 1, and the reply's own metadata are written before training begins.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.accounting.types import Adjacency, Scope, Unit, View
from fedveil.errors import BudgetExhausted, ConfigError, FedveilError, UpdateRefused
from fedveil.flower.app_arrays import UNTOUCHED, AppArrays
from fedveil.ledger.population_budget import lifetime_budget
from fedveil.methods.base import Setting, gaussian_plan
from fedveil.methods.method_registry import method_from
from fedveil.release.door import Door
from fedveil.release.noise import Randomness
from fedveil.training.local import LocalSpec
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.ledger.budgeted_ledger import BudgetedLedger
    from fedveil.release.plan import Plan

ITSELF = 0
"""The number under which a client counts itself."""
SCOPE = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.SERVER)
_OTHER = "refused: dp_mod releases what a train function trained; register it with @app.train(mods=[...]), not for the whole app"
_SPENT = "refused: the budget of this client is spent"
_UNFIT = "refused: the instruction, or the ledger of this client, is not what dp_mod needs; the client's own log has the reason"
_PRECONDITION = 6
"""Flower's error code of a mod that cannot go on."""
_log = logging.getLogger(__name__)

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

        if message.metadata.message_type.partition(".")[0] != "train":
            return _refusal(message, _OTHER)
        reply, refusals = Message(RecordDict(), reply_to=message), {text: _refusal(message, text) for text in (_SPENT, _UNFIT)}
        ledger = None
        try:
            name, arrays = _instructed(message.content, self.untouched)
            ledger = self._ledger(context)
            door = Door(arrays.layout, SCOPE, "flower", ledger, Randomness(0))
            round = _round(message.content)
            if not door.admits(self.plan, ITSELF, round):
                raise BudgetExhausted(f"{self.folder}: nothing is left for a release")
            update = _trained(door, arrays, message, context, call_next)
            upload = door.upload(update, self.plan, ITSELF, round)
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

    def _ledger(self, context: Any) -> BudgetedLedger:
        """The lifetime of this client; in a simulation each partition is a client with a lifetime of its own."""
        part = context.node_config.get("partition-id")
        name = "client" if part is None else f"client-{int(part)}"
        budget = lifetime_budget(self.folder / f"{name}.sqlite", self.epsilon, self.delta, SCOPE)
        return budget.ledger(f"flower/{int(context.run_id)}", ITSELF)


def _trained(door: Door, arrays: AppArrays, message: Any, context: Any, call_next: Train) -> Tensor:
    """What training moved, or zero where there is nothing that may leave."""
    try:
        update = arrays.update(call_next(message, context).content)
    except KeyboardInterrupt:
        raise
    except BaseException:
        _log.warning("training failed, and a noised zero is released", exc_info=True)
        return arrays.nothing
    if problem := door.problem(update, {}):
        _log.warning("%s; a noised zero is released", problem)
        return arrays.nothing
    return update


def _instructed(content: Any, untouched: Sequence[str]) -> tuple[str, AppArrays]:
    """The one ArrayRecord of an instruction, with its name."""
    records = list(content.array_records.items())
    if len(records) != 1:
        raise UpdateRefused(f"the instruction has {len(records)} ArrayRecords, and dp_mod needs one")
    return records[0][0], AppArrays.of(records[0][1], untouched)


def _round(content: Any) -> int:
    """The server's number of the round, by which the ledger's row is labelled, from 0; nothing else depends on it."""
    numbers = [config.get("server-round") for config in content.config_records.values()]
    return next((n - 1 for n in numbers if type(n) is int and 1 <= n < 2**62), 0)


def _refusal(message: Any, reason: str) -> Any:
    from flwr.app import Error, Message

    return Message(Error(code=_PRECONDITION, reason=reason), reply_to=message)
