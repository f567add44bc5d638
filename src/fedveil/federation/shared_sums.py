"""Noise in shares under secure aggregation: plans by the size of a set, the terms of a run, and masks in one process."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedveil.errors import ConfigError, FedveilError
from fedveil.mechanism.plan import Plan, Released, digest, in_shares
from fedveil.release.sealed import ELSEWHERE, Contribution
from fedveil.secure_aggregation.attempt_file import AttemptFile
from fedveil.secure_aggregation.coordinator import Coordinator
from fedveil.secure_aggregation.encoding import Terms
from fedveil.secure_aggregation.masks import Integers, needed_bits
from fedveil.secure_aggregation.member import Member
from fedveil.secure_aggregation.roster import Roster, RosterClient

if TYPE_CHECKING:
    from fedveil.federation.round import Context
    from fedveil.methods.setting import Setting
    from fedveil.release.release_layout import ReleaseLayout

_RARE = math.sqrt(2 * 64 * math.log(2))
"""Standard deviations that the norm of Gaussian noise exceeds its expectation by with a probability below 2^-64."""


@dataclass(frozen=True)
class SetPlans:
    """The plans of a round by the size of its set: for a client (see `SharedRelease`) and for the server (see `SharedPlans`).

    Args:
        whole: plan with noise on the sum. parts: layout of a release. terms: of the run.
    """

    whole: Plan
    parts: ReleaseLayout
    terms: Terms

    def of(self, members: int) -> Plan:
        """Return the plan of each client of a set of this size: the shares of honest clients amount to the noise of the sum."""
        return in_shares(self.whole, members - self.terms.colluders)

    def plan(self, members: int) -> bytes:
        """Return the digest of that plan.

        Raises:
            ConfigError: a sum under this plan could wrap.
        """
        plan = self.of(members)
        if (bits := sum_bits(plan, self.parts, members, self.terms.attempts)) > self.terms.bits:
            raise ConfigError(f"a sum of this round needs {bits} bits a coordinate, and the run has {self.terms.bits}")
        return digest(plan)

    def plausible(self, total: Integers, members: int) -> bool:
        """Return whether each part of a sum has a norm that honest clients exceed with a probability below 2^-64."""
        plan = self.of(members)
        for (part, std, clip), (_, k) in zip(self.parts.groups(plan), self.parts.grid(plan), strict=True):
            data, noise = members * min(clip, plan.clip) * 2.0**-k, std * 2.0**-k * math.sqrt(members)
            root = math.sqrt(part.stop - part.start)
            most = data + noise * (root + _RARE) + members * root / 2  # the noise is rounded
            if not np.linalg.norm(total[part].astype(np.float64)) <= most:
                return False
        return True


def sum_bits(plan: Plan, parts: ReleaseLayout, members: int, attempts: int) -> int:
    """Return b, the bits that a coordinate of a masked sum of shares needs; the same for all plans of one price.

    A noise std has between 2^g and 2^(g + 1) grid steps, of which the bound takes the most.
    """
    most = 2.0 ** ((plan.mechanism.bits if parts.bits is None else parts.bits) + 1)
    ratios = [min(clip, plan.clip) / std for _, std, clip in parts.groups(plan) if std]
    return max(needed_bits(ratio * most, most, members, attempts * parts.dimension) for ratio in ratios)


def terms_of(context: Context, s: Setting, run: str, offer: bytes, roster: Roster) -> Terms:
    """Return the terms of a run, the same at the server and at each client.

    Args:
        offer: SHA-256 of the configuration, without a client's own number.
    """
    first = context.plan(Released(0, context.model.vector.to("cpu"), None), context.policy.start())
    if not isinstance(first, Plan):
        raise ConfigError("privacy.noise_place = 'shares' needs plans that are made before training")
    shares, parts, attempts = in_shares(first, s.cohort - s.known_shares), context.door.parts, s.rounds + s.spares
    bits = sum_bits(shares, parts, s.cohort, attempts)
    return Terms(run, offer, roster, s.least_set, s.known_shares, attempts, bits, parts.dimension)


@dataclass
class SimulatedMasks:
    """Secure aggregation of all clients in one process: the same masks and checks as in a deployment, without messages.

    The keys are new in each process, and no bit of a sum depends on them.
    """

    terms: Terms
    members: Mapping[int, Member]
    coordinator: Coordinator

    @classmethod
    def of(cls, context: Context, s: Setting, run: str, offer: str) -> SimulatedMasks:
        """Return the two sides of a run. offer: its configuration as text."""
        keys = {client: Ed25519PrivateKey.generate() for client in range(s.clients)}
        raw = [RosterClient(i, f"client {i}", key.public_key().public_bytes_raw()) for i, key in keys.items()]
        terms = terms_of(context, s, run, hashlib.sha256(offer.encode()).digest(), Roster(tuple(raw)))
        members = {client: Member(client, key, terms, AttemptFile()) for client, key in keys.items()}
        return cls(terms, members, Coordinator(terms, AttemptFile()))

    def summed(self, round: int, told: bytes, sealed: Sequence[Contribution], plans: SetPlans) -> list[Contribution]:
        """Return the contributions of a round with their masked sum in the first.

        Raises:
            FedveilError: there is no sum.
        """
        coordinator, vectors = self.coordinator, {c.client: c.sealed.numpy() for c in sealed}
        coordinator.begin(round, told, plans)
        problems = [
            coordinator.ready(client, self.members[client].ready(round, told, _Sealed(plans, vector)))
            for client, vector in vectors.items()
        ]
        if (request := coordinator.name_set()) is not None:
            problems += [coordinator.masked(c, self.members[c].masked(request)) for c in coordinator.members]
        total = coordinator.total()
        if total is None or any(problems):
            reason = next(filter(None, problems), "fewer clients than privacy.min_survivors, or no attempts left")
            raise FedveilError(f"the masked sum of round {round} cannot be opened: {reason}")
        first, *others = sealed
        return [replace(first, sealed=torch.from_numpy(total)), *(replace(c, sealed=ELSEWHERE) for c in others)]


@dataclass(frozen=True)
class _Sealed:
    """A release that the engine has trained and noised already."""

    plans: SetPlans
    vector: Integers = field(repr=False)

    def plan(self, members: int) -> bytes:
        return self.plans.plan(members)

    def train(self) -> None:
        pass

    def noisy(self, members: int) -> Integers:
        return self.vector
