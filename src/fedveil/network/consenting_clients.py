"""Whom the server asks: clients that were admitted, are online, and have consented to the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fedveil.flower.grid_engine import GONE
from fedveil.flower.wire_format import WireError
from fedveil.network.offers import ONLY_LOOKS, offer_bytes, read_consent

if TYPE_CHECKING:
    from fedveil.network.offers import Offer


class Reach(Protocol):
    """Clients who are online, and how messages reach them."""

    @property
    def online(self) -> Collection[int]:
        """Their numbers."""
        ...

    def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> Mapping[int, bytes | str]:
        """As `Exchange.answers`."""
        ...


AGAIN = 60.0
"""Seconds after which a client that refused, or a round that nobody answered, is asked again."""
_LOOK = 1.0
SILENT = "it has not joined, or did not answer"


@dataclass
class ConsentingClients:
    """An `Exchange` with those clients that were admitted, are online, and have consented.

    A client that has not been asked yet is offered the run first. One that refuses is named with its reason, once as long as it
    is the same, and asked again when it was away, as for another consent, or after AGAIN seconds. One that only looks (`fedveil
    join --check`) is offered it again when it comes back. One whose machine
    answers with an error is offered it again and again, and named once as long as the error is the same.

    A round in which nobody is yet is asked again when a client comes, or after AGAIN seconds: once where clients are there whom
    it does not ask, and until somebody answers where there are none.

    Args:
        reach: how those who are online are reached. offered: makes the offer to a client. clients: how many the run has.
        tell: called with a line for each thing that happens. sleep: called with the seconds between two looks at who is there.
    """

    reach: Reach
    offered: Callable[[int], Offer]
    clients: int
    tell: Callable[[str], None]
    sleep: Callable[[float], None] = time.sleep
    refused: dict[int, str] = field(default_factory=dict)
    consented: set[int] = field(default_factory=set)
    looked: set[int] = field(default_factory=set)
    unanswered: dict[int, str] = field(default_factory=dict)
    _asked: dict[int, float] = field(default_factory=dict)

    def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> dict[int, bytes | str]:
        """As `Exchange.answers`."""
        self.offer(self._open(set(messages)))
        asked = {client: parts for client, parts in messages.items() if client in self.consented}
        found: dict[int, bytes | str] = {c: self.refused.get(c) or self.unanswered.get(c, SILENT) for c in messages}
        found |= self.reach.answers(asked)
        self.consented -= {client for client, answer in found.items() if answer == GONE}  # offered again when they are back
        return found

    def again(self, clients: Set[int], tries: int) -> bool:
        """Wait for a client of a round in which there is none yet, and say whether they are to be asked again.

        Args:
            tries: how often they were asked before.
        """
        others = set(range(self.clients)) - clients
        if tries:
            self.offer(self._open(others))
            if others & self.consented & set(self.reach.online):
                return False
        else:
            self.tell(f"the round waits for the first answer of its {len(clients)} clients, and asks again every minute")
        there, end = set(self.reach.online), time.monotonic() + AGAIN
        while time.monotonic() < end and not (now := set(self.reach.online)) - there:
            there = now
            self.sleep(_LOOK)
        return True

    def gather(self, clients: set[int], count: int, wait: Callable[[], None]) -> None:
        """Offer the run to clients as they come, until so many of those online have consented; no other answer counts.

        Args:
            wait: called between two looks at who is online.
        """
        shown = (-1, -1, -1)
        while True:
            online = set(self.reach.online)
            self.looked &= online
            self.offer(self._open(clients) - self.looked)
            if shown != (now := (len(online & self.consented), len(self.refused), len(self.looked))):
                others = "".join(f"; {many} {did}" for many, did in zip(now[1:], ("refused", "only looked"), strict=True) if many)
                self.tell(f"{now[0]} clients have consented, {count} are waited for{others}")
                shown = now
            if now[0] >= count:
                return
            wait()

    def _open(self, clients: set[int]) -> set[int]:
        """Those of them that are to be asked."""
        for client in self._asked.keys() - set(self.reach.online):
            del self._asked[client]
        now = time.monotonic()
        return {c for c in clients - self.consented if c not in self._asked or now > self._asked[c] + AGAIN}

    def offer(self, clients: set[int]) -> None:
        """Offer the run to clients that have not consented."""
        offers = {c: self.offered(c) for c in sorted(clients & set(self.reach.online))}
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
                self._asked[client], said = time.monotonic(), f"refused to take part: {reason}"
                if self.refused.get(client) != said:
                    self.tell(f"client {client} {said}")
                self.refused[client] = said
            else:
                self.refused.pop(client, None)
                self.consented.add(client)
