"""Whom the server asks: clients that were admitted, are online, and have consented to the run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fedveil.flower.grid_engine import GONE
from fedveil.flower.wire_format import WireError
from fedveil.network.offers import ONLY_LOOKS, offer_bytes, offer_of, read_consent

if TYPE_CHECKING:
    from fedveil.configuration.config import Config


class Reach(Protocol):
    """Clients who are online, and how messages reach them."""

    @property
    def online(self) -> Collection[int]:
        """Their numbers."""
        ...

    def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> Mapping[int, bytes | str]:
        """As `Exchange.answers`."""
        ...


_SILENT = "it has not joined, or did not answer"


@dataclass
class ConsentingClients:
    """An `Exchange` with those clients that were admitted, are online, and have consented.

    A client that has not been asked yet is offered the run first. One that refuses is named with its reason, and asked no more
    by this server process. One that only looks (`fedveil join --check`) is offered it again when it comes back. One whose machine
    answers with an error is offered it again and again, and named once as long as the error is the same.

    Args:
        reach: how those who are online are reached. run, config: what is offered.
        tell: called with a line for each thing that happens.
    """

    reach: Reach
    run: str
    config: Config
    tell: Callable[[str], None]
    refused: dict[int, str] = field(default_factory=dict)
    consented: set[int] = field(default_factory=set)
    looked: set[int] = field(default_factory=set)
    unanswered: dict[int, str] = field(default_factory=dict)

    def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> dict[int, bytes | str]:
        """As `Exchange.answers`."""
        self.offer(set(messages) - self.consented - set(self.refused))
        asked = {client: parts for client, parts in messages.items() if client in self.consented}
        found: dict[int, bytes | str] = {c: self.refused.get(c) or self.unanswered.get(c, _SILENT) for c in messages}
        found |= self.reach.answers(asked)
        self.consented -= {client for client, answer in found.items() if answer == GONE}  # offered again when they are back
        return found

    def gather(self, clients: set[int], count: int, wait: Callable[[], None]) -> None:
        """Offer the run to clients as they come, until so many of those online have answered; who only looks does not count.

        Args:
            wait: called between two looks at who is online.
        """
        shown = (-1, -1)
        while True:
            online = set(self.reach.online)
            self.looked &= online
            self.offer(clients - self.consented - set(self.refused) - self.looked)
            there = online & (self.consented | set(self.refused))
            if shown != (now := (len(there), len(self.looked))):
                only = f"; {now[1]} only looked" if now[1] else ""
                self.tell(f"{now[0]} clients have answered the offer, {count} are waited for{only}")
                shown = now
            if len(there) >= count:
                return
            wait()

    def offer(self, clients: set[int]) -> None:
        """Offer the run to clients that have not consented."""
        offers = {c: offer_of(self.run, c, self.config) for c in sorted(clients & set(self.reach.online))}
        for client, answer in self.reach.answers({c: (offer_bytes(offer),) for c, offer in offers.items()}).items():
            if isinstance(answer, str):
                if self.unanswered.get(client) != answer:
                    self.tell(f"client {client}: {answer}")
                self.unanswered[client] = answer
                continue
            self.unanswered.pop(client, None)
            try:
                reason = read_consent(answer, offers[client])
            except WireError as problem:
                reason = str(problem)
            if reason == ONLY_LOOKS:
                self.looked.add(client)
                self.tell(f"client {client}: {reason}")
            elif reason:
                self.refused[client] = f"refused to take part: {reason}"
                self.tell(f"client {client} {self.refused[client]}")
            else:
                self.consented.add(client)
