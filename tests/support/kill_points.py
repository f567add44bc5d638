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


MASKED_CLIENT: dict[str, Point] = {
    "before training": ("fedveil.deploy.masked_rounds", "attempted", "before"),
    "after training": ("fedveil.deploy.masked_rounds", "attempted", "after"),
    "its vector masked, before its row": ("fedveil.secure_aggregation.attempt_file.AttemptFile", "write", "before"),
    "its row written": ("fedveil.secure_aggregation.attempt_file.AttemptFile", "write", "after"),
    "before its state is written": ("fedveil.deploy.client_node.ClientStates", "keep", "before"),
    "its state written": ("fedveil.deploy.client_node.ClientStates", "keep", "after"),
    "its answer noted": ("fedveil.experiment.receipts.ClientReceipts", "answer", "after"),
    "the receipt noted": ("fedveil.experiment.receipts.ClientReceipts", "keep", "after"),
    "after the answer": ("fedveil.deploy.join.JoinedClient", "answer", "after"),
}
"""Of a client with secure aggregation, whose releases are charged at consent."""

MASKED_SERVER: dict[str, Point] = {
    "before it names a set": ("fedveil.secure_aggregation.coordinator.Coordinator", "name_set", "before"),
    "the attempt is on its disk": ("fedveil.secure_aggregation.coordinator.Coordinator", "name_set", "after"),
    "the sum is there": ("fedveil.secure_aggregation.coordinator.Coordinator", "total", "after"),
    "the answers are noted": ("fedveil.experiment.receipts.ServerReceipts", "record", "after"),
    "the receipt is made": ("fedveil.experiment.receipts.ServerReceipts", "issue", "after"),
    **{point: where for point, where in SERVER.items() if point != "before the instruction"},
}
"""Of a server with secure aggregation."""

BY_PROGRAM: dict[str, dict[str, Point]] = {
    "client": CLIENT | CARRIED,
    "server": SERVER,
    "masked client": MASKED_CLIENT | CARRIED,
    "masked server": MASKED_SERVER,
}
"""The points of each program, as processes of their own."""


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
