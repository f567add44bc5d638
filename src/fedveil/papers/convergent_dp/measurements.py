"""Measurements of the convergent f-DP analysis for a row's configuration: claimed, refuting and valid mu. Nothing is trained."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.accounting.gaussian import mu_of
from fedveil.accounting.last_iterate import lipschitz, shift
from fedveil.accounting.types import View
from fedveil.errors import ConfigError, unknown
from fedveil.experiment.config import Config
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.methods.setting import Setting
from fedveil.papers.convergent_dp.claim import (
    GROWTH,
    FedAvgClaim,
    claim_fedprox,
    composition_mu,
    learning_rates,
    linear_loss_mu,
    optimum_of_rounds,
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
    config: Config,
    run: Path | None,
    folder: Path,
    *,
    rounds: list[int] | None = None,
    steps: list[int] | None = None,
    epsilon: float = 1.0,
    analysis: str = "",
) -> Measured:
    """Return mu of the last model after each of `rounds`: claimed by Theorems 3 and 4, exact for linear losses, composed.

    `minimum` is H_0 with the printed rho_t and gamma_t. A value has entries `..._mu`; `..._sigma`, the noise std of an upload at
    which this mu gives (epsilon, `privacy.delta`); `..._rdp`, the epsilon of Renyi DP at order 2; and, after `training.rounds` by
    each K of `steps`, `..._mu_by_steps`. `growth` is the noise after the last of `rounds` in units of that after the first.

    Args:
        analysis: an analysis of Table 3 whose order of growth is returned instead.
    """
    chosen, (s, method) = rounds or [config.training.rounds], _noisy(config, config.training.rounds)
    if analysis:
        if analysis not in GROWTH:
            raise unknown("measure.analysis", analysis, "analysis of Table 3", GROWTH)
        first, last = (GROWTH[analysis](t, s.steps, s.cohort, s.delta) for t in (chosen[0], chosen[-1]))
        return {"growth": [(1, last / first)]}
    series: dict[str, list[tuple[int, float]]] = {}
    std = _std(s, method)
    for t in chosen:
        at = replace(s, rounds=t)
        for name, mu in _mus(at, method, std).items():
            series.setdefault(f"{name}_mu", []).append((t, mu))
            series.setdefault(f"{name}_sigma", []).append((t, mu * std / mu_of(epsilon, s.delta)))
            series.setdefault(f"{name}_rdp", []).append((t, mu**2))
    for k in steps or ():
        for name, mu in _mus(replace(s, local=replace(s.local, steps=k)), method, std).items():
            series.setdefault(f"{name}_mu_by_steps", []).append((k, mu))
    sigmas = series["claimed_sigma"]
    return series | {"growth": [(1, sigmas[-1][1] / sigmas[0][1])]}


def of_sensitivity_terms(config: Config, run: Path | None, folder: Path) -> Measured:
    """Return rho_t and gamma_t of Theorem 2 over the rounds: as Table 2 prints them, and without its approximations."""
    s, method = _noisy(config, config.training.rounds)
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in ("rho_printed", "rho", "gamma_printed", "gamma")}
    for t, (rates, printed) in enumerate(zip(_rates(s), _printed(s, method), strict=True)):
        exact = lipschitz(rates, method.smoothness, proximal=_proximal(method)), _shift(rates, s, method)
        for name, value in zip(found, (printed[0], exact[0], printed[1], exact[1]), strict=True):
            found[name].append((t + 1, value))
    return found


def _mus(s: Setting, method: Noisy, std: float) -> dict[str, float]:
    """Return mu of the last model by each way of counting, with noise `std` on each upload."""
    shifts = [_shift(rates, s, method) for rates in _rates(s)]
    rhos, gammas = zip(*_printed(s, method), strict=True)
    return {
        "claimed": _claimed(s, method, std),
        "linear": linear_loss_mu(shifts, s.cohort, std),
        "composed": composition_mu(shifts, s.cohort, std, View.AGGREGATE),
        "minimum": math.sqrt(s.cohort * optimum_of_rounds(rhos, gammas)) / std,
    }


def _printed(s: Setting, method: Noisy) -> list[tuple[float, float]]:
    """Return (rho_t, gamma_t) of each round as Table 2 prints them."""
    if isinstance(method, NoisyFedProx):
        return [printed_sensitivity_fedprox(batch_clip(s), method.proximal, method.smoothness, s.cohort)] * s.rounds
    return [printed_sensitivity(_theorem(s, method), t) for t in range(s.rounds)]


def _shift(rates: NDArray[np.float64], s: Setting, method: Noisy) -> float:
    return shift(rates, batch_clip(s), s.cohort, proximal=_proximal(method))


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


def _claimed(s: Setting, method: Noisy, std: float) -> float:
    """Return mu of Theorem 3 or 4, as printed."""
    if isinstance(method, NoisyFedProx):
        return claim_fedprox(
            clip=batch_clip(s),
            proximal=method.proximal,
            smoothness=method.smoothness,
            rounds=s.rounds,
            clients=s.cohort,
            noise_std=std,
        )
    return replace(_theorem(s, method), noise_std=std).mu


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
