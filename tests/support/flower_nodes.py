"""Clients of a run in this process that get and give the bytes of the wire, without Flower in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedveil.deploy.client_node import ClientNode, ClientStates
from fedveil.federation.round import Context
from fedveil.release.release_layout import NullLedger


def unchanged(client: int, round: bytes, task: bytes, answer: bytes) -> bytes | str:
    return answer


@dataclass
class Nodes:
    """An `Exchange`; `tamper` may change what a client answers, `gone` do not answer."""

    context: Context
    folder: Path
    tamper: Callable[[int, bytes, bytes, bytes], bytes | str] = unchanged
    gone: set[int] = field(default_factory=set)
    rounds: int = 1000

    def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> dict[int, bytes | str]:
        found: dict[int, bytes | str] = {}
        for client, (common, task) in messages.items():
            found[client] = "gone"
            if client not in self.gone:
                found[client] = self.tamper(client, common, task, self.node(client).answer(common, task))
        return found

    def node(self, client: int) -> ClientNode:
        """As a client that has just come up: it knows what lies on its disk."""
        own = replace(self.context, door=replace(self.context.door, ledger=NullLedger(), memory=None))
        return ClientNode(own, self.context.door.run, client, ClientStates(self.folder / str(client)), self.rounds)
