"""The folder of a client of a Flower app: its lifetime, and what it was sent the first time.

A folder is the lifetime of one client, whatever its node is called. Only the nodes of a simulation, which Flower numbers by the
part of the data that each has, keep several lifetimes in one folder.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import ConfigError, LedgerError
from fedveil.flower.app_arrays import Kind
from fedveil.ledger.ledger_head import head_path, read_head
from fedveil.ledger.owner_only import owner_only, owner_only_folder
from fedveil.ledger.population_budget import lifetime_budget
from fedveil.ledger.whole_files import replace_whole

if TYPE_CHECKING:
    from fedveil.accounting.types import Scope
    from fedveil.flower.app_arrays import Kinds
    from fedveil.ledger.budgeted_ledger import BudgetedLedger

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
