"""What a method is written with: the base class, the public setting, and the parts that most methods share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, cast

from pydantic import BaseModel, ConfigDict, model_validator

from fedveil.accounting.accountant import AccountantName
from fedveil.accounting.types import Claim, Event, Unbounded, View
from fedveil.errors import ConfigError
from fedveil.methods.method import (
    CoverageMean,
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
    """Parameters of a method: frozen, no unknown keys; and what most methods do, for each to override what is its own.

    The defaults are those of DP-FedAvg with a method's own `policy`: plain local training, uniform weights, the mean, and noise
    calibrated to the configured epsilon. `reconstructed`: what of it is rebuilt rather than read in a source, or empty.
    `proven_defaults`: defaults of the proven variant where they are not those of the published one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    reconstructed: ClassVar[str] = ""
    proven_defaults: ClassVar[Mapping[str, Any]] = {}
    name: str

    @model_validator(mode="after")
    def _of_variant(self) -> Self:
        """What was not given has the variant's own default; it still counts as not given."""
        if getattr(self, "variant", "proven") == "proven":
            self.__dict__.update((key, value) for key, value in self.proven_defaults.items() if key not in self.model_fields_set)
        return self

    def extras(self, s: Setting) -> Mapping[str, tuple[int, ...]]:
        return {}

    def client_epsilons(self, s: Setting) -> Sequence[float]:
        """All clients have the cap of the run."""
        return ()

    def check(self, s: Setting) -> None:
        """Refuse a setting that the method has no price for."""

    def calibration_accountant(self, s: Setting) -> AccountantName:
        """That by which the noise is calibrated."""
        return "auto"

    def calibrate(self, s: Setting) -> Setting:
        """The noise multiplier that the configured epsilon needs."""
        self.check(s)
        return calibrated(cast("Method", self), s, self.calibration_accountant(s))

    def release(self, s: Setting) -> Release:
        """A method says here what leaves."""
        raise ConfigError(f"{type(self).__qualname__} is not a method yet: it lacks `release`, which plans what leaves")

    def client(self, s: Setting) -> Client:
        return Plain()

    def server(self, s: Setting) -> SumServer | UploadServer:
        return Mean()

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Read off the plan where it is always the same; else f / z a round, which the budget enforces plan by plan."""
        release = self.release(s)
        if isinstance(release, Unproven):
            return [Unbounded(release.reason)]
        return planned_releases(release.always, s, view) if isinstance(release, Fixed) else gaussian_releases(s, view)

    def claim(self, s: Setting) -> Claim | None:
        return None

    def clip_norm(self, s: Setting) -> float | None:
        """The parameter `clip`, where there is one."""
        return getattr(self, "clip", None)

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """Nothing beyond what every run rests on."""
        return ()


def reads_public_split(s: Setting) -> tuple[str, ...]:
    """The assumption of a method that reads the public split, in a run that has one."""
    return ("data.public_fraction sets examples aside that are public",) if s.public_split else ()


__all__ = [
    "CoverageMean",
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
