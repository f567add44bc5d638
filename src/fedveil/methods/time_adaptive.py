"""Time-adaptive spending (Kiani et al. 2025): clients save privacy in early rounds, each within an individual epsilon.

The cost of each round for each client is fixed before the data are touched, so the proof is composition along a known plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedveil.accounting.accountant import AccountantName
from fedveil.accounting.types import Event, View
from fedveil.mechanism.plan import LocalDpSgd, Plan
from fedveil.methods.base import MethodConfig, Release, Schedule, Scheduled, Setting, gaussian_plan, planned_releases


class TimeAdaptive(MethodConfig):
    """DP-FedAvg, or DP-SGD inside the clients, which spends less in its first rounds; groups of clients have caps of their own.

    Args:
        clip: C, L2 bound on an update; where caps differ, smaller for strict clients and larger for others. Not for DP-SGD.
        epsilons: the cap of each group, the largest equal to privacy.epsilon (server view); empty: all clients have that one.
        shares: of the clients in each group, by client number from 0 on; empty: equal shares.
        save_until: the share of the rounds in which a group saves; one number for all groups, or one for each.
        saving: factor of a saving round on mu of an upload, or on the sampling rate of records (DP-SGD).
    """

    name: Literal["time-adaptive"] = "time-adaptive"
    reconstructed: ClassVar[str] = (
        "all but what notes about the paper say; the paper samples clients less often in saving rounds and hides who took part, "
        "here uploads have more noise, or records are sampled less often; the defaults are guesses"
    )
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    epsilons: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    save_until: tuple[float, ...] = (0.25,)
    saving: float = Field(0.5, gt=0, le=1)

    @model_validator(mode="after")
    def _fit(self) -> Self:
        groups = max(1, len(self.epsilons))
        if len(set(self.epsilons)) < len(self.epsilons) or not all(e > 0 for e in self.epsilons):
            raise ValueError(f"method.epsilons = {list(self.epsilons)}: give each group another epsilon > 0")
        if self.shares and (len(self.shares) != groups or min(self.shares) <= 0 or abs(sum(self.shares) - 1) > 1e-9):
            raise ValueError(f"method.shares = {list(self.shares)}: give {groups} numbers > 0, one for each epsilon, of sum 1")
        if len(self.save_until) not in (1, groups) or not all(0 <= part <= 1 for part in self.save_until):
            raise ValueError(
                f"method.save_until = {list(self.save_until)}: give one number from 0 to 1, or one for each of method.epsilons"
            )
        return self

    def client_epsilons(self, s: Setting) -> Sequence[float]:
        """Return the cap of each client, one group after the other."""
        if not self.epsilons:
            return ()
        shares = self.shares or (1 / len(self.epsilons),) * len(self.epsilons)
        ends = [round(sum(shares[: i + 1]) * s.clients) for i in range(len(shares))]
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return [epsilon for epsilon, size in zip(self.epsilons, sizes, strict=True) for _ in range(size)]

    def calibration_accountant(self, s: Setting) -> AccountantName:
        """Return "rdp" if sampling amplifies unequal rounds, whose budget is a Renyi filter."""
        sampled = s.example_clip is not None or (s.amplified and s.scope.view is not View.SERVER)
        return "rdp" if sampled and self.saving < 1 and any(self.save_until) else "auto"

    def release(self, s: Setting) -> Release:
        """Return a plan for each round, the same for all clients unless they have individual caps."""
        if s.groups:
            return SavedAndSpent(self, s)
        return Scheduled(tuple(self.plan(s, saves=t < self.saving_rounds(s)) for t in range(s.rounds)))

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Return the releases of one client in all rounds that it may be in, the expensive rounds first."""
        spending = min(s.participations, s.rounds - self.saving_rounds(s))
        kinds = ((self.plan(s, saves=False), spending), (self.plan(s, saves=True), s.participations - spending))
        return [e for plan, rounds in kinds if rounds for e in planned_releases(plan, replace(s, rounds=rounds), view)]

    def saving_rounds(self, s: Setting) -> int:
        """Return the number of first rounds in which clients with this setting's cap save."""
        group = self.epsilons.index(s.epsilon) if s.epsilon in self.epsilons else 0
        return round(self.save_until[min(group, len(self.save_until) - 1)] * s.rounds) if self.saving < 1 else 0

    def multiplier(self, s: Setting, *, saves: bool) -> float:
        """Return z of an upload."""
        return s.z / self.saving if saves else s.z

    def plan(self, s: Setting, *, saves: bool) -> Plan:
        """Return a round's plan if all clients have the setting's noise."""
        step = s.dp_sgd()
        if step is None:
            return gaussian_plan(replace(s, noise_multiplier=self.multiplier(s, saves=saves)), self.clip)
        part = self.saving if saves else 1.0
        return LocalDpSgd(step=replace(step, rate=part * step.rate, expected=part * step.expected))


@dataclass(frozen=True)
class SavedAndSpent(Schedule):
    """Schedule with the noise and saving rounds of each client's cap, which are known beforehand.

    Args:
        everyone: the setting of all clients.
    """

    method: TimeAdaptive
    everyone: Setting

    def plan(self, s: Setting, t: int) -> Plan:
        """Return c_n = C h / z_n with noise C h, for the harmonic mean h of all z_n, so that all uploads have the same noise."""
        plan = self.method.plan(s, saves=self._saves(s, t))
        if isinstance(plan, LocalDpSgd):
            return plan
        shrunk = self._harmonic(t) / self._multiplier(s, t)
        return replace(plan, clip=plan.clip * shrunk, noise_std=plan.noise_std * shrunk)

    def _saves(self, one: Setting, round: int) -> bool:
        return round < self.method.saving_rounds(one)

    def _multiplier(self, one: Setting, round: int) -> float:
        return self.method.multiplier(one, saves=self._saves(one, round))

    def _harmonic(self, round: int) -> float:
        s = self.everyone
        return s.clients / sum(len(g.clients) / self._multiplier(s.of_group(g), round) for g in s.groups)
