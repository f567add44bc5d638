"""The messages before the first round: the server offers a run, the client consents or refuses.

OFFER     from the server: the run, the client's number, the whole configuration, and its fedveil
CONSENT   from the client: the digest of the offer, and the epsilon that it has certified by itself
REFUSAL   from the client: why not
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from typing import Any

from fedveil import __version__
from fedveil.configuration.config import Config, flat, parse
from fedveil.data.partition import checked_options
from fedveil.errors import ConfigError
from fedveil.flower.wire_format import (
    Kind,
    WireError,
    WireMessage,
    decoded,
    digest,
    encoded,
    require_parts,
    run_name,
    text,
    whole_number,
)

LEFT_OUT = {"run": ("engine", "track", "name", "clients_at_once"), "data": ("data_dir", "download"), "privacy": ("budget",)}
"""Keys of a configuration that concern one machine alone, and are not offered."""
_MOST = 2**20
"""Bytes of an offer: one with 10,000 columns has a third of that."""
ONLY_LOOKS = "this client only looks at what is offered (--check)"
"""Its reason to refuse: it is no refusal of the run, and the client may come back."""


@dataclass(frozen=True)
class Offer:
    """A run that a client is asked to take part in. config: nested dict of plain values. fedveil: the version of who asks."""

    run: str
    client: int
    config: dict[str, Any]
    fedveil: str = __version__

    @property
    def digest(self) -> str:
        """SHA-256 of what is asked, whoever's version asks it."""
        return hashlib.sha256(offer_bytes(replace(self, fedveil=""))).hexdigest()

    def parsed(self) -> Config:
        """The configuration, checked.

        Raises:
            WireError: it is none, or this side would fill in what it leaves open, by defaults that may not be the server's.
        """
        try:
            found = parse(json.loads(json.dumps(self.config)))
            here = offer_of(self.run, self.client, found).config
        except ConfigError as problem:
            raise WireError(f"an offer whose configuration cannot be accepted: {problem}") from None
        if here != self.config:
            ours, theirs = flat(here), flat(self.config)
            keys = [k for k in sorted(ours.keys() | theirs.keys()) if k not in theirs or ours.get(k, ...) != theirs[k]]
            raise WireError(
                f"an offer that does not say {', '.join(keys) or 'all'} as this client's fedveil would: install the same fedveil "
                f"on both sides"
            )
        return found


def offer_of(run: str, client: int, config: Config) -> Offer:
    """The offer of a configuration, with all defaults, and without what concerns the server's machine alone."""
    whole = config.resolved() | {"task": config.task.model_dump(mode="json")}
    whole["model"] |= config.model.options.model_dump(mode="json")
    whole["data"]["partition"] |= checked_options(config.data.partition).model_dump(mode="json")
    for section, keys in LEFT_OUT.items():
        for key in keys:
            whole[section].pop(key)
    if config.data.source is not None:
        source = config.data.source.model_dump(mode="json", exclude={"name", "test_file"})
        whole["data"]["source"] = source | {"file": "the client's own"}
    return Offer(run, client, whole)


def _fields(offer: Offer) -> dict[str, Any]:
    return {"run": offer.run, "client": offer.client, "config": offer.config, "fedveil": offer.fedveil}


def offer_bytes(offer: Offer) -> bytes:
    """The message on the wire."""
    return encoded(WireMessage(Kind.OFFER, _fields(offer)))


def read_offer(content: bytes) -> Offer:
    """The offer that the server sent; raises WireError."""
    if len(content) > _MOST:
        raise WireError(f"an offer has at most {_MOST} bytes, this one has {len(content)}")
    message = decoded(content, Kind.OFFER)
    require_parts(message, ("run", "client", "config", "fedveil"))
    config = message.fields.get("config")
    if type(config) is not dict:
        raise WireError("an offer without a configuration")
    return Offer(run_name(message), whole_number(message, "client"), config, text(message, "fedveil"))


def consent_bytes(offer: Offer, epsilon: float) -> bytes:
    """The client's consent on the wire."""
    return encoded(
        WireMessage(Kind.CONSENT, {"run": offer.run, "client": offer.client, "offer": offer.digest, "epsilon": epsilon})
    )


def refusal_bytes(offer: Offer, reason: str) -> bytes:
    """The client's refusal on the wire."""
    shown = "".join(c if c.isprintable() else " " for c in reason)[:1000]
    return encoded(WireMessage(Kind.REFUSAL, {"run": offer.run, "client": offer.client, "reason": shown}))


def read_consent(content: bytes, offer: Offer) -> str:
    """Why the client refuses, or an empty string where it consents to this very offer; raises WireError."""
    message = decoded(content, Kind.CONSENT, Kind.REFUSAL)
    consents = message.kind is Kind.CONSENT
    require_parts(message, ("run", "client", *(("offer", "epsilon") if consents else ("reason",))))
    if (text(message, "run"), whole_number(message, "client")) != (offer.run, offer.client):
        raise WireError("an answer to another offer")
    if not consents:
        return text(message, "reason")
    epsilon = message.fields["epsilon"]
    if type(epsilon) is not float or not 0 <= epsilon < math.inf:
        raise WireError("a consent whose epsilon is no finite number")
    if digest(message, "offer") != offer.digest:
        raise WireError("a consent to another configuration")
    return ""
