"""The messages before the first round, and the clients that the server asks: admitted, online, and consenting.

OFFER     from the server: the run, the client's number, the whole configuration, and its version of fedveil
CONSENT   from the client: the digest of the offer, the epsilon that it has certified by itself, and its version of fedveil
REFUSAL   from the client: the reason
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fedveil import __version__
from fedveil.data.partition import checked_options
from fedveil.deploy.grid_engine import GONE
from fedveil.deploy.wire_format import (
    Kind,
    WireError,
    WireMessage,
    decoded,
    digest,
    encoded,
    printable,
    require_parts,
    run_name,
    text,
    whole_number,
)
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config, flat, parse
from fedveil.secure_aggregation.roster import Roster, RosterClient

LEFT_OUT = {"run": ("engine", "track", "name", "clients_at_once"), "data": ("data_dir", "download"), "privacy": ("budget",)}
"""Configuration keys that concern one machine only, and are not offered."""
_MOST = 2**20
"""Largest size of an offer in bytes: one with 10,000 columns takes a third."""
ONLY_LOOKS = "this client only looks at what is offered (--check)"
"""Reason of a client that only looks: it does not refuse the run, and may come back."""


@dataclass(frozen=True)
class Offer:
    """Invitation to a run.

    Args:
        config: nested dict of plain values. receipt_key: Ed25519 public key (hex) by which the server signs receipts, or "".
        roster: number, name and key (hex) of each client, for secure aggregation; else empty. fedveil: version of the sender.
    """

    run: str
    client: int
    config: dict[str, Any]
    receipt_key: str = ""
    roster: Sequence[Sequence[Any]] = ()
    fedveil: str = field(default_factory=lambda: __version__)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the offer, independent of the sender's version."""
        return hashlib.sha256(offer_bytes(replace(self, fedveil=""))).hexdigest()

    @property
    def common_digest(self) -> bytes:
        """Return the SHA-256 of what is offered to all clients alike: the offer without the client's own number."""
        return hashlib.sha256(offer_bytes(replace(self, client=0, fedveil=""))).digest()

    @property
    def signers(self) -> Roster:
        """Return the roster; raise WireError if there is none, or it is invalid."""
        try:
            return Roster(tuple(RosterClient(number, name, bytes.fromhex(key)) for number, name, key in self.roster))
        except (ValueError, TypeError, ConfigError) as problem:
            raise WireError(f"an offer without a valid roster, which secure aggregation needs ({problem})") from None

    def parsed(self) -> Config:
        """Return the checked configuration.

        Raises:
            WireError: it is invalid, or incomplete: this side's defaults may not be the server's.
        """
        try:
            config = parse(json.loads(json.dumps(self.config)))
            here = offer_of(self.run, self.client, config).config
        except ConfigError as problem:
            raise WireError(f"an offer whose configuration cannot be accepted: {problem}") from None
        if here != self.config:
            ours, theirs = flat(here), flat(self.config)
            keys = [k for k in sorted(ours.keys() | theirs.keys()) if k not in theirs or ours.get(k, ...) != theirs[k]]
            raise WireError(
                f"an offer that does not give {', '.join(keys) or 'all'} as this client's fedveil would: install "
                f"the same fedveil on both sides"
            )
        return config


def offer_of(run: str, client: int, config: Config, receipt_key: str = "", roster: Roster | None = None) -> Offer:
    """Return the offer of a configuration, with all defaults, and without keys that concern only the server's machine."""
    listed = () if roster is None else roster.clients
    whole = config.resolved() | {"task": config.task.model_dump(mode="json")}
    whole["model"] |= config.model.options.model_dump(mode="json")
    whole["data"]["partition"] |= checked_options(config.data.partition).model_dump(mode="json")
    for section, keys in LEFT_OUT.items():
        for key in keys:
            whole[section].pop(key)
    if config.data.source is not None:
        source = config.data.source.model_dump(mode="json", exclude={"name", "test_file"})
        whole["data"]["source"] = source | {"file": "the client's own"}
    return Offer(run, client, whole, receipt_key, [[one.number, one.name, one.key.hex()] for one in listed])


def _fields(offer: Offer) -> dict[str, Any]:
    return vars(offer)


def offer_bytes(offer: Offer) -> bytes:
    """Return the message as bytes."""
    return encoded(WireMessage(Kind.OFFER, _fields(offer)))


def read_offer(content: bytes) -> Offer:
    """Return the offer that the server sent; raise WireError if it is invalid."""
    if len(content) > _MOST:
        raise WireError(f"an offer has at most {_MOST} bytes, this one has {len(content)}")
    message = decoded(content, Kind.OFFER)
    require_parts(message, ("run", "client", "config", "receipt_key", "roster", "fedveil"))
    config = message.fields.get("config")
    if type(config) is not dict:
        raise WireError("an offer without a configuration")
    key = digest(message, "receipt_key") if message.fields.get("receipt_key") else ""
    roster = message.fields["roster"]
    if type(roster) is not list:
        raise WireError("an offer whose roster is no list")
    return Offer(run_name(message), whole_number(message, "client"), config, key, roster, text(message, "fedveil"))


def consent_bytes(offer: Offer, epsilon: float) -> bytes:
    """Return the client's consent as bytes."""
    fields = {"run": offer.run, "client": offer.client, "offer": offer.digest, "epsilon": epsilon, "fedveil": __version__}
    return encoded(WireMessage(Kind.CONSENT, fields))


def refusal_bytes(offer: Offer, reason: str) -> bytes:
    """Return the client's refusal as bytes."""
    printable = "".join(c if c.isprintable() else " " for c in reason)[:1000]
    return encoded(WireMessage(Kind.REFUSAL, {"run": offer.run, "client": offer.client, "reason": printable}))


def read_consent(content: bytes, offer: Offer) -> str:
    """Return why the client refuses, or an empty string if it consents to exactly this offer; raise WireError otherwise."""
    message = decoded(content, Kind.CONSENT, Kind.REFUSAL)
    consents = message.kind is Kind.CONSENT
    require_parts(message, ("run", "client", *(("offer", "epsilon", "fedveil") if consents else ("reason",))))
    if (text(message, "run"), whole_number(message, "client")) != (offer.run, offer.client):
        raise WireError("an answer to another offer")
    if not consents:
        return text(message, "reason")
    epsilon = message.fields["epsilon"]
    if type(epsilon) is not float or not 0 <= epsilon < math.inf:
        raise WireError("a consent whose epsilon is no finite number")
    if digest(message, "offer") != offer.digest:
        raise WireError("a consent to another configuration")
    if (version := text(message, "fedveil")) != offer.fedveil:
        raise WireError(
            f"the client has fedveil {printable(version)}, and the server {offer.fedveil}: install the same version on both sides"
        )
    return ""


class Reach(Protocol):
    """Online clients, and the transport of messages to them."""

    @property
    def online(self) -> Collection[int]:
        """Return their numbers."""
        ...

    def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> Mapping[int, bytes | str]:
        """Return each client's reply, or an error string; see `Exchange.answers`."""
        ...


AGAIN = 60.0
"""Seconds after which a client that refused, or a round without answers, is asked again."""
_LOOK = 1.0
SILENT = "it has not joined, or did not answer"


@dataclass
class ConsentingClients:
    """`Exchange` with the clients that are admitted, online, and have consented.

    A client is first offered the run. One that refuses is reported with its reason, once in a row for the same reason. It is
    asked again after it was away, perhaps for another consent, or after AGAIN seconds. One that only looks (`fedveil join
    --check`) is offered the run again when it comes back. One whose machine answers with an error is offered it repeatedly, and
    reported once in a row for the same error.

    A round without participants is asked again when a client comes, or after AGAIN seconds: once if other clients are online that
    it does not ask, and otherwise until somebody answers.

    Args:
        reach: transport to online clients. offered: makes the offer to a client. clients: number of clients in the run.
        tell: called with a line for each event. sleep: called with the seconds between two checks of who is online.
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
    versions: dict[int, str] = field(default_factory=dict)
    _asked: dict[int, float] = field(default_factory=dict)

    def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> dict[int, bytes | str]:
        """Return each client's reply, or an error string; see `Exchange.answers`."""
        self.offer(self._open(set(messages)))
        asked = {client: parts for client, parts in messages.items() if client in self.consented}
        results: dict[int, bytes | str] = {c: self.refused.get(c) or self.unanswered.get(c, SILENT) for c in messages}
        results |= self.reach.answers(asked)
        self.consented -= {client for client, answer in results.items() if answer == GONE}  # offered again when they are back
        return results

    def again(self, clients: Set[int], tries: int) -> bool:
        """Wait for a client of a round without participants, and return whether to ask the round's clients again.

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
        online, end = set(self.reach.online), time.monotonic() + AGAIN
        while time.monotonic() < end and not (now := set(self.reach.online)) - online:
            online = now
            self.sleep(_LOOK)
        return True

    def gather(self, clients: set[int], count: int, wait: Callable[[], None]) -> None:
        """Offer the run to clients as they come, until `count` of those online have consented; no other answer counts.

        Args:
            wait: called between two checks of who is online.
        """
        reported = (-1, -1, -1)
        while True:
            online = set(self.reach.online)
            self.looked &= online
            self.offer(self._open(clients) - self.looked)
            if reported != (now := (len(online & self.consented), len(self.refused), len(self.looked))):
                others = "".join(f"; {many} {did}" for many, did in zip(now[1:], ("refused", "only looked"), strict=True) if many)
                self.tell(f"clients: {now[0]} consented, {count} needed{others}")
                reported = now
            if now[0] >= count:
                return
            wait()

    def _open(self, clients: set[int]) -> set[int]:
        """Return the clients that are due to be asked."""
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
                self._asked[client], refusal = time.monotonic(), f"refused to take part: {reason}"
                if self.refused.get(client) != refusal:
                    self.tell(f"client {client} {refusal}")
                self.refused[client] = refusal
            else:
                self.refused.pop(client, None)
                self.consented.add(client)
                self.versions[client] = offers[client].fedveil
