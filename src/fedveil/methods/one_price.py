"""Methods whose runs have a price fixed before the data are seen."""

from __future__ import annotations

from dataclasses import replace

from fedveil.accounting.types import Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, UnprovenPlan
from fedveil.methods.base import MethodConfig
from fedveil.methods.method import EvenPolicy, Fixed, Method, Scheduled, weighting_of
from fedveil.methods.setting import Setting


def _known_plans(method: Method, s: Setting) -> tuple[Plan, ...]:
    """Return the plans of all rounds if they are fixed before the data are seen and scale with one noise multiplier, else ()."""
    if not (isinstance(method, MethodConfig) and type(method).calibrate is MethodConfig.calibrate):
        return ()
    release = method.release(replace(s, noise_multiplier=1.0) if s.noise_multiplier is None else s)
    plans = (release.always,) if isinstance(release, Fixed) else release.plans if isinstance(release, Scheduled) else ()
    return () if any(plan.mechanism.stateful for plan in plans) else plans


def check_selection(method: Method, s: Setting) -> None:
    """Refuse a search without a known price, which requires runs whose plans are fixed before the data are seen.

    Raises:
        ConfigError: plans that adapt, noise not set by a single multiplier, a unit or view that a search does not protect, or a
            guarantee that does not cover the whole search.
    """
    if s.selection is None:
        return
    if not _known_plans(method, s):
        raise ConfigError(
            "privacy.selection needs a method whose noise is fixed before the run by one noise multiplier, and that of "
            f"method.name = '{method.name}' is not: take dp-fedavg, dp-fedsam or time-adaptive, or choose settings on public "
            "data (fedveil tune --on)"
        )
    if s.scope.unit is not Unit.CLIENT or s.scope.view is View.SERVER:
        raise ConfigError(
            f"privacy.selection with privacy.unit = '{s.scope.unit}' and privacy.view = '{s.scope.view}': a score protects whole "
            f"clients, and the server's view holds every run: set privacy.unit = 'client' and privacy.view = 'aggregate'"
        )
    if s.selection.shape is None and s.selection.runs > 1 and s.epsilon is not None:
        raise ConfigError(
            f"privacy.epsilon = {s.epsilon:g} cannot be a target where privacy.selection has runs without a shape, all of "
            "which were looked at: their epsilon is computed from their noise. Leave privacy.epsilon out and set "
            "privacy.noise_multiplier"
        )


def check_noise_cohort(method: Method, s: Setting) -> None:
    """Refuse noise of a larger federation unless it is a single noise level on the sum of a round.

    Raises:
        ConfigError: a federation that is not larger, or releases of another kind.
    """
    larger = s.noise_cohort
    if larger is None:
        return
    if larger.clients < s.clients or not s.cohort <= larger.clients_per_round <= larger.clients:
        raise ConfigError(
            f"privacy.noise_cohort = {larger.clients} clients, {larger.clients_per_round} per round: give at least as many as "
            f"this federation has ({s.clients} clients, {s.cohort} per round), and no more clients per round than clients"
        )
    plans = _known_plans(method, s)
    if not plans or s.scope.unit is not Unit.CLIENT or s.scope.view is View.SERVER or any(p.place != "sum" for p in plans):
        raise ConfigError(
            f"privacy.noise_cohort applies to noise on the sum of a round, fixed before the run: method.name = '{method.name}' "
            f"with privacy.unit = '{s.scope.unit}' and privacy.view = '{s.scope.view}' has no such noise. Set privacy.unit = "
            "'client', privacy.view = 'aggregate' and method.name = 'dp-fedavg', 'dp-fedsam' or 'time-adaptive', or leave "
            "privacy.noise_cohort out"
        )


def check_shares(method: Method, s: Setting) -> None:
    """Refuse noise in shares unless a round is a sum of a known set of clients, and all rounds cost the same.

    Raises:
        ConfigError: with the reason and what to change.
    """
    if s.noise_place == "sum":
        for name, given in (("run.secure_aggregation", s.secure_aggregation), ("privacy.spare_attempts", s.spare_attempts)):
            if given not in ("none", None):
                raise ConfigError(
                    f"{name} = {given!r} needs noise that clients add in shares, and privacy.noise_place is 'sum': set "
                    f"privacy.noise_place = 'shares', or leave out {name}",
                    key=name,
                    value=given,
                )
        return
    known, n, uneven = s.known_shares, s.cohort, _uneven(method, s)
    refusals: tuple[tuple[bool, str, object, str, str], ...] = (
        (
            s.example_clip is not None,
            "training.local",
            "dp-sgd",
            "DP-SGD adds its noise inside each client, and holds against the server without shares",
            "leave privacy.noise_place out",
        ),
        (
            s.scope.view is not View.AGGREGATE,
            "privacy.view",
            str(s.scope.view),
            "shares of noise protect the sum of a round",
            "set privacy.view = 'aggregate'",
        ),
        (
            s.sampling == "poisson",
            "training.sampling",
            "poisson",
            "the clients of a set see who else is in it, so that chance earns nothing",
            "set training.sampling = 'fixed'",
        ),
        (
            s.max_participations is not None,
            "privacy.max_participations",
            s.max_participations,
            "every sum is charged to all clients",
            "leave it out",
        ),
        (
            s.noise_cohort is not None,
            "privacy.noise_cohort",
            s.noise_cohort,
            "clients add the noise of the set that they are in, not that of a larger federation",
            "leave it out",
        ),
        (
            s.selection is not None,
            "privacy.selection",
            s.selection,
            "runs that lose stay secret there, and members of a set see every sum",
            "leave it out",
        ),
        (
            bool(method.client_epsilons(s)),
            "method.name",
            method.name,
            "clients with budgets of their own need noise of their own, and a sum has one",
            "give all clients one budget",
        ),
        (
            weighting_of(method) != "uniform",
            "method.weighting",
            weighting_of(method),
            "weights by examples tell the sizes of the clients, and need the sum of all weights",
            "set it to 'uniform'",
        ),
        (bool(uneven), "method.name", method.name, uneven, "take dp-fedavg or adaptive-clipping"),
        (
            not known + 2 <= s.least_set <= n,
            "privacy.min_survivors" if s.min_survivors is not None else "training.clients_per_round",
            s.min_survivors if s.min_survivors is not None else n,
            f"a set holds at least two honest clients beside the {known} whose noise counts as known (privacy.colluders), "
            f"and at most the {n} of a round",
            f"give a number between {known + 2} and {n}" if n >= known + 2 else "take more clients per round",
        ),
    )
    for wrong, key, value, because, instead in refusals:
        if wrong:
            raise ConfigError(
                f"{key} = {value!r} with privacy.noise_place = 'shares': {because}; {instead}", key=key, value=value
            )


def _uneven(method: Method, s: Setting) -> str:
    """Return why the noise of a method cannot be added in shares, or an empty string."""
    release = method.release(replace(s, noise_multiplier=s.noise_multiplier or 1.0))
    plan = release.always if isinstance(release, Fixed) else None
    if (plan is None and not isinstance(release, EvenPolicy)) or isinstance(plan, UnprovenPlan):
        return "attempts are repeated, so that each round must have a proven cost, the same in all, which this method has not"
    if plan is not None and plan.mechanism.stateful:
        return "its noise is correlated over the rounds, which takes the same set of clients in all of them"
    if plan is not None and plan.place != "sum":
        return "it adds noise to each upload, and not to the sum"
    if plan is not None and plan.clamp is not None:
        return "it clamps what is noisy, and a clamp of shares is none of the sum"
    return ""
