"""Combinations of unit, adjacency, view and bound that make no sense, refused with the reason and with what to do instead.

Why each is refused:

- A *hidden-state* bound (last iterate, contraction) speaks of somebody who sees the last model only. The server sees uploads, and
  every client sees every global model, so in the server and aggregate views it bounds nothing.
- *Amplification by sampling clients* needs secrecy of who took part. The server sees it. `SampledGaussian` also needs secrecy of
  how many did. Where each client adds a share of the noise, everybody sees that: the sum has more noise in the rounds with more
  participants. So it is credited only for Poisson samples of which nothing but a sum with common noise is seen.
  `SeenCountGaussian` is for Poisson samples whose size is seen, `FixedSampleGaussian` for secret samples of fixed size. Sampling
  of records inside a client (DP-SGD, `UserRecordsGaussian`) stays secret in every view.
- *delta >= 1 / units* is met by publishing one unit at random.

What is sensible although it looks odd: a *client-level mechanism* for the record unit. It bounds how far a client's whole
contribution goes, so under client-level replace-one it protects each record at least as well: changing one record is one way of
changing the client's data. Taking one record out also moves the clipped contribution from one admissible value to another, up
to 2 C apart, not from a value to zero: at record level both adjacencies cost what replacing costs, also under sampling
(`neighbouring_pair`).
"""

from __future__ import annotations

from collections.abc import Sequence

from fedveil.accounting._numbers import at_least, positive
from fedveil.accounting.secret_samples import rate_of
from fedveil.accounting.types import (
    Adjacency,
    Event,
    FixedSampleGaussian,
    Gaussian,
    SampledGaussian,
    Scope,
    Unbounded,
    Unit,
    UserRecordsGaussian,
    View,
    small,
)
from fedveil.errors import ConfigError


def check_sampling_credit(
    events: Sequence[Event], scope: Scope, *, poisson: bool, rate: float, records_sampled: bool, noise_in_shares: bool
) -> None:
    """Refuse amplification by sampling where the sample is not secret, not Poisson, or larger than credited.

    Args:
        events: the releases as they would be charged in `scope`.
        poisson: clients join independently with probability `rate`. records_sampled: the sampling is of records inside a client.
        noise_in_shares: each upload carries noise of its own, so that the noise of a sum tells how many took part.
    """
    credited = [event for event in events if not isinstance(event, Gaussian | Unbounded) and rate_of(event) < 1]
    if not credited or (records_sampled and scope.unit is Unit.RECORD):
        return
    if any(isinstance(event, UserRecordsGaussian) for event in credited):
        raise ConfigError("sampling of records is credited, but no records are sampled: set training.local = 'dp-sgd'")
    least = min(rate_of(event) for event in credited)
    if scope.view is View.SERVER:
        raise ConfigError(
            f"amplification by sampling clients (rate {least:g}) is credited in the server view, where it is seen who takes "
            f"part: charge the full Gaussian cost of each participation, or set privacy.view = 'aggregate'"
        )
    wrong = [event for event in credited if isinstance(event, FixedSampleGaussian) is poisson]
    if wrong:
        name, drawn, other = ("fixed-size", "independently", "fixed") if poisson else ("Poisson", "in fixed numbers", "poisson")
        raise ConfigError(
            f"amplification by {name} sampling (rate {rate_of(wrong[0]):g}) is credited, but clients are drawn {drawn}: "
            f"set training.sampling = {other!r}, or charge the full Gaussian cost of each participation"
        )
    if noise_in_shares and any(isinstance(event, SampledGaussian) for event in credited):
        raise ConfigError(
            f"amplification by sampling clients (rate {least:g}) is credited in the {scope.view} view, but each upload carries "
            f"noise of its own, so the noise of a sum tells how many took part: set training.sampling = 'fixed', or charge the "
            f"full cost"
        )
    if least < rate * (1 - 1e-9):
        raise ConfigError(f"sampling rate {least:g} is credited, but each client joins with probability {rate:g}")


def is_vacuous(delta: float, units: int) -> bool:
    """Return whether delta >= 1 / units, which publishing one unit at random would satisfy."""
    return positive("delta", delta) * at_least("units", units, 1) >= 1


def check_delta(delta: float, units: int, unit: Unit, *, allow_vacuous_delta: bool) -> None:
    """Refuse a vacuous delta in a proven run unless it is explicitly allowed."""
    if is_vacuous(delta, units) and not allow_vacuous_delta:
        raise ConfigError(
            f"privacy.delta = {small(delta)} is not below 1 / {units} (the number of {unit}s), so publishing one {unit} at "
            f"random would satisfy it: set privacy.delta below {1 / units:.3g}, or privacy.allow_vacuous_delta = true to run "
            f"anyway"
        )


def neighbouring_pair(scope: Scope, *, per_example: bool) -> Adjacency:
    """The adjacency whose worst-case pair sampled releases have: replace-one where one record moves a whole clipped update.

    Args:
        per_example: contributions of single records are clipped (DP-SGD), so that taking one out is zeroing it.
    """
    if scope.unit is Unit.RECORD and not per_example:
        return Adjacency.REPLACE_ONE
    return scope.adjacency
