"""Everything needed to write a method: the base class, the public setting, and common parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, cast

from pydantic import BaseModel, ConfigDict, model_validator

from fedveil.accounting.accountant import AccountantName
from fedveil.accounting.types import Claim, Event, Unbounded, View
from fedveil.errors import ConfigError
from fedveil.methods.method import (
    CoverageMean,
    EvenPolicy,
    Fixed,
    Mean,
    Method,
    Policy,
    Release,
    Schedule,
    Scheduled,
    Summed,
    SumServer,
    Unproven,
    UploadServer,
    Variant,
    Weighting,
    as_trained,
    mean,
    what_is_not_zero,
)
from fedveil.methods.run_cost import calibrated, gaussian_plan, gaussian_releases, planned_releases, sum_noise
from fedveil.methods.setting import Setting
from fedveil.training.local import Client, Plain


class MethodConfig(BaseModel):
    """Base of a method: its parameters, frozen and without unknown keys, and defaults of its functions.

    The defaults are those of DP-FedAvg: plain local training, uniform weights, the mean, and noise calibrated to the configured
    epsilon. `reconstructed`: parts that are reconstructed because no source states them, or empty. `proven_defaults`: defaults
    of the proven variant that differ from those of the published one. `proven_difference`: how the proven variant differs from
    the paper, for its statement; a clause without a full stop.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    reconstructed: ClassVar[str] = ""
    proven_defaults: ClassVar[Mapping[str, Any]] = {}
    proven_difference: ClassVar[str] = ""
    name: str

    @model_validator(mode="after")
    def _of_variant(self) -> Self:
        """Set parameters that were not given to the variant's default; they still count as not given."""
        if getattr(self, "variant", "proven") == "proven":
            self.__dict__.update((key, value) for key, value in self.proven_defaults.items() if key not in self.model_fields_set)
        return self

    def extras(self, s: Setting) -> Mapping[str, tuple[int, ...]]:
        return {}

    def client_epsilons(self, s: Setting) -> Sequence[float]:
        """Return no individual caps: all clients have the cap of the run."""
        return ()

    def check(self, s: Setting) -> None:
        """Refuse a setting that the method has no price for."""

    def calibration_accountant(self, s: Setting) -> AccountantName:
        """Return the accountant by which the noise is calibrated."""
        return "auto"

    def calibrate(self, s: Setting) -> Setting:
        """Return the setting with the noise multiplier that the configured epsilon needs."""
        self.check(s)
        return calibrated(cast("Method", self), s, self.calibration_accountant(s))

    def release(self, s: Setting) -> Release:
        """Return the part that plans each release; every method must define it."""
        raise ConfigError(
            f"{type(self).__qualname__} is not a method yet: it lacks `release`, which plans each release: define it"
        )

    def client(self, s: Setting) -> Client:
        return Plain()

    def server(self, s: Setting) -> SumServer | UploadServer:
        return Mean()

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Return the cost of a fixed plan; otherwise f / z per round, which the budget enforces plan by plan."""
        release = self.release(s)
        if isinstance(release, Unproven):
            return [Unbounded(release.reason)]
        return planned_releases(release.always, s, view) if isinstance(release, Fixed) else gaussian_releases(s, view)

    def claim(self, s: Setting) -> Claim | None:
        return None

    def clip_norm(self, s: Setting) -> float | None:
        """Return the parameter `clip`, or None if the method has none."""
        return getattr(self, "clip", None)

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """Return no assumptions beyond those of every run."""
        return ()


def reads_public_split(s: Setting) -> tuple[str, ...]:
    """Return the assumption of a method that reads the public split, if the run has one."""
    return ("data.public_fraction sets examples aside that are public",) if s.public_split else ()


__all__ = [
    "CoverageMean",
    "EvenPolicy",
    "Fixed",
    "Mean",
    "Method",
    "MethodConfig",
    "Policy",
    "Release",
    "Schedule",
    "Scheduled",
    "Setting",
    "SumServer",
    "Summed",
    "Unproven",
    "UploadServer",
    "Variant",
    "Weighting",
    "as_trained",
    "calibrated",
    "gaussian_plan",
    "gaussian_releases",
    "mean",
    "planned_releases",
    "reads_public_split",
    "sum_noise",
    "what_is_not_zero",
]
