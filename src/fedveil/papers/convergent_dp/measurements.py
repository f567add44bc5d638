"""Measurements of the convergent f-DP analysis for a row's configuration: claimed, refuting and valid mu. Nothing is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.accounting.gaussian import mu_of
from fedveil.accounting.last_iterate import lipschitz, shift
from fedveil.accounting.types import View
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.methods.setting import Setting
from fedveil.papers.convergent_dp.claim import (
    FedAvgClaim,
    claim_fedprox,
    composition_mu,
    learning_rates,
    linear_loss_mu,
    printed_sensitivity,
    printed_sensitivity_fedprox,
)
from fedveil.papers.convergent_dp.method import NoisyFedAvg, NoisyFedProx, batch_clip, schedule_of, trajectory, upload_std
from fedveil.studies.reproduce.measurements import Measure
from fedveil.studies.reproduce.recipe import Measured

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Noisy = NoisyFedAvg | NoisyFedProx


def of_worst_privacy(
    config: Config, run: Path | None, folder: Path, *, rounds: list[int] | None = None, epsilon: float = 1.0
) -> Measured:
    """Return mu of the last model after each of `rounds`: claimed by Theorems 3 and 4, exact for linear losses, composed.

    Each value also has an entry `..._sigma`: the noise std of an upload at which this mu gives (epsilon, `privacy.delta`).
    """
    series: dict[str, list[tuple[int, float]]] = {}
    for t in rounds or [config.training.rounds]:
        s, method = _noisy(config, t)
        shifts, std = [shift(rates, batch_clip(s), s.cohort, proximal=_proximal(method)) for rates in _rates(s)], _std(s, method)
        mus = {
            "claimed": _claimed(s, method),
            "linear": linear_loss_mu(shifts, s.cohort, std),
            "composed": composition_mu(shifts, s.cohort, std, View.AGGREGATE),
        }
        for name, mu in mus.items():
            series.setdefault(f"{name}_mu", []).append((t, mu))
            series.setdefault(f"{name}_sigma", []).append((t, mu * std / mu_of(epsilon, s.delta)))
    return series


def of_sensitivity_terms(config: Config, run: Path | None, folder: Path) -> Measured:
    """Return rho_t and gamma_t of Theorem 2 over the rounds: as Table 2 prints them, and without its approximations."""
    s, method = _noisy(config, config.training.rounds)
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in ("rho_printed", "rho", "gamma_printed", "gamma")}
    for t, rates in enumerate(_rates(s)):
        alpha, v = _proximal(method), batch_clip(s)
        if isinstance(method, NoisyFedProx):
            printed = printed_sensitivity_fedprox(v, alpha, method.smoothness, s.cohort)
        else:
            printed = printed_sensitivity(_theorem(s, method), t)
        exact = lipschitz(rates, method.smoothness, proximal=alpha), shift(rates, v, s.cohort, proximal=alpha)
        values = (printed[0], exact[0], printed[1], exact[1])
        for name, value in zip(found, values, strict=True):
            found[name].append((t + 1, value))
    return found


def _noisy(config: Config, rounds: int) -> tuple[Setting, Noisy]:
    """Return the setting for that many rounds with calibrated noise, and the method."""
    method, s = calibrated_setting(config)
    if not isinstance(method, Noisy):
        raise ConfigError(f"this measurement is of noisy-fedavg and noisy-fedprox, not of {method.name}")
    return replace(s, rounds=rounds), method


def _std(s: Setting, method: Noisy) -> float:
    return upload_std(s, trajectory(s, _proximal(method)))


def _proximal(method: Noisy) -> float:
    return method.proximal if isinstance(method, NoisyFedProx) else 0.0


def _rates(s: Setting) -> NDArray[np.float64]:
    return learning_rates(schedule_of(s), s.local.optimizer.lr, s.steps, s.rounds)


def _claimed(s: Setting, method: Noisy) -> float:
    """Return mu of Theorem 3 or 4, as printed."""
    if isinstance(method, NoisyFedProx):
        return claim_fedprox(
            clip=batch_clip(s),
            proximal=method.proximal,
            smoothness=method.smoothness,
            rounds=s.rounds,
            clients=s.cohort,
            noise_std=_std(s, method),
        )
    return _theorem(s, method).mu


def _theorem(s: Setting, method: NoisyFedAvg) -> FedAvgClaim:
    """Return Theorem 3 in this setting."""
    return FedAvgClaim(
        schedule_of(s),
        learning_rate=s.local.optimizer.lr,
        clip=batch_clip(s),
        steps=s.steps,
        smoothness=method.smoothness,
        rounds=s.rounds,
        clients=s.cohort,
        noise_std=_std(s, method),
        scale=method.scale,
    )


WORST_PRIVACY = Measure("mu of the last model: claimed, exact for linear losses, composed", False, of_worst_privacy)
SENSITIVITY_TERMS = Measure("rho and gamma of a round: printed, and exact", False, of_sensitivity_terms)
