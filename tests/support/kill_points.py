"""Each point of a deployed round at which a process may be killed, as a function of the code that is called there.

In-process tests raise `Killed` there; `killed_program.py` sends its own process SIGKILL.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import wraps
from pydoc import locate
from typing import Any, Literal

import pytest

Point = tuple[str, str, Literal["before", "after"]]
"""Of a class or module, the function; and whether it is called yet."""

CLIENT: dict[str, Point] = {
    "before training": ("fedveil.deploy.client_node", "client_round", "before"),
    "during training": ("fedveil.federation.round", "train", "after"),
    "between the charges of lifetime and run": ("fedveil.ledger.budgeted_ledger.BudgetedLedger", "_charge_population", "after"),
    "after the charge": ("fedveil.deploy.client_node.ClientStates", "keep", "before"),
    "its state written, the older one not swept": ("fedveil.deploy.client_node", "sync_path", "after"),
    "before the answer": ("fedveil.deploy.client_node.ClientStates", "keep", "after"),
    "after the answer": ("fedveil.deploy.join.JoinedClient", "answer", "after"),
}
"""In the server view; where sums are noised a client charges at consent, and these points pass without a charge."""

CARRIED: dict[str, Point] = {"after the answer was carried": ("fedveil.deploy.join", "answer_message", "after")}
"""Of a client, where Flower is in between."""

SERVER: dict[str, Point] = {
    "before the instruction": ("fedveil.deploy.grid_engine.GridEngine", "map", "before"),
    "after the answers": ("fedveil.federation.fit", "_uploads", "before"),
    "after the charge": ("fedveil.ledger.budgeted_ledger.BudgetedLedger", "_charge", "after"),
    "before the checkpoint": ("fedveil.federation.checkpoint.Checkpoints", "begin", "before"),
    "the checkpoint's journal written": ("fedveil.federation.checkpoint.Checkpoints", "_append", "after"),
    "the checkpoint's head written": ("fedveil.federation.checkpoint.Checkpoints", "_sweep", "before"),
    "after the checkpoint": ("fedveil.experiment.run", "append_history", "before"),
}


def kill_at(
    patch: pytest.MonkeyPatch,
    point: Point,
    numbers: Container[int],
    kill: Callable[[], Any],
    ours: Callable[[], bool] = lambda: True,
) -> None:
    """Call `kill` when the point is reached for one of these times (from 1), counting those calls that are `ours`."""
    where, name, when = point
    owner: Any = locate(where)
    function, reached = getattr(owner, name), [0]

    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        counted = ours()
        reached[0] += counted
        now = counted and reached[0] in numbers
        if now and when == "before":
            kill()
        result = function(*arguments, **named)
        if now and when == "after":
            kill()
        return result

    patch.setattr(owner, name, called)
