"""The release of a method in a run: each plan of its policy, or of its schedule as it was hashed before the first round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, Raw, Released, Upload, digest
from fedveil.methods.parts import Policy, Schedule, Unproven
from fedveil.methods.setting import Setting
from fedveil.training.local import HasMetrics, State

if TYPE_CHECKING:
    from fedveil.methods.method import Method


@dataclass(frozen=True)
class Planner:
    """The source of a run's plans, for one client (server view) or for all of them (client -1).

    Args:
        part: the release. hashes: of a schedule, that of the plan of each round, for each cap of clients.
    """

    part: Schedule | Policy | Unproven
    setting: Setting
    hashes: tuple[tuple[bytes, ...], ...] = ()
    _last: dict[int, tuple[int, Plan]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, part: Schedule | Policy | Unproven, s: Setting) -> Planner:
        """Return the planner of a release; the plans of a schedule are all made and hashed.

        Raises:
            ConfigError: the part, or a plan, is of another type.
        """
        if isinstance(part, Policy | Unproven):
            return cls(part, s)
        if not isinstance(part, Schedule):
            raise ConfigError(
                f"a method's `release` returned {type(part).__name__}; allowed are Schedule, Policy and Unproven "
                f"(fedveil.methods.base)"
            )
        return cls(part, s, tuple(tuple(_hashes(part, one)) for one in [s.of_group(group) for group in s.groups] or [s]))

    @property
    def common(self) -> bool:
        """Whether all clients have the same plan, which is known beforehand."""
        return isinstance(self.part, Schedule) and not self.setting.groups

    def start(self) -> State:
        """Return the state before the first release."""
        return self.part.start(self.setting) if isinstance(self.part, Policy) else {}

    def plan(self, seen: Released, state: State) -> Plan | Raw:
        """Return the plan of the coming release.

        Raises:
            ConfigError: it is not the one that was made before the first round, or no plan.
        """
        s = self.setting.of(seen.client)
        if isinstance(self.part, Unproven):
            return Raw(self.part.reads, partial(self.part.make, s, seen), self.part.reason)
        if isinstance(self.part, Policy):
            return checked(self.part.plan(s, seen, state), seen.round)
        return self._scheduled(s, seen.client, seen.round)

    def observe(self, state: State, upload: Upload) -> State:
        """Return the state after a release."""
        return self.part.observe(self.setting.of(upload.client), state, upload) if isinstance(self.part, Policy) else state

    def observe_all(self, state: State, uploads: Sequence[Upload]) -> State:
        """Return the server's state after all uploads of a round."""
        return self.part.observe_all(self.setting, state, uploads) if isinstance(self.part, Policy) else state

    def measured(self, states: Sequence[State]) -> list[Mapping[str, float | list[float]]]:
        """Return the figures of each state, if the part has any (see `HasMetrics`)."""
        return [self.part.measures(state) if state else {} for state in states] if isinstance(self.part, HasMetrics) else []

    def _scheduled(self, s: Setting, client: int, t: int) -> Plan:
        """The plan of that round, kept for the other clients of its cap."""
        cap = next((i for i, group in enumerate(self.setting.groups) if client in group.clients), 0)
        made, plan = self._last.get(cap, (-1, None))
        if made != t or plan is None:
            assert isinstance(self.part, Schedule)
            plan = checked(self.part.plan(s, t), t)
            made_first = self.hashes[cap][t : t + 1]  # none of a round after the last, which only an audit asks for
            if made_first and digest(plan) != made_first[0]:
                raise ConfigError(f"the plan of round {t} is not the one that was made before the first round")
            self._last[cap] = t, plan
        return plan


def is_common(method: Method, s: Setting) -> bool:
    """Whether all clients have the same plan in a round, which is known before the first."""
    return isinstance(method.release(s), Schedule) and not s.groups


def checked(plan: Any, t: int) -> Plan:
    """Return a plan.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(plan, Plan):
        raise ConfigError(f"a release's `plan` returned {type(plan).__name__} for round {t}; it must return a Plan")
    return plan


def _hashes(schedule: Schedule, s: Setting) -> list[bytes]:
    found: list[bytes] = []
    before = None
    for t in range(s.rounds):
        plan = checked(schedule.plan(s, t), t)
        found.append(found[-1] if plan is before else digest(plan))
        before = plan
    return found
