"""The privacy statement of a configuration before any training, and the plans that fit a guarantee. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from fedveil.accounting.attack_power import exact_mu, largest_tpr, tpr_of
from fedveil.accounting.learnability import expected_share, gathered_ratio
from fedveil.accounting.types import Event, Gaussian, Guarantee, Unbounded, Unit, View
from fedveil.errors import ConfigError
from fedveil.experiment.public_setting import method_of, population_of, setting_of
from fedveil.experiment.public_values import beside_the_releases, public_values
from fedveil.ledger.entry import event_columns
from fedveil.methods.one_price import check_noise_cohort, check_selection, check_shares
from fedveil.methods.run_cost import charged_bound, check_groups, check_weights, run_releases, run_variation
from fedveil.statement import caveats, scope_checks
from fedveil.statement.advice import learnability, own_level
from fedveil.statement.caveats import check_evaluation, seen_count_epsilon
from fedveil.statement.statement import FPR, VIEWS, Assumption, GroupNumbers, NoiseShares, PlannedRelease, Statement, ViewNumbers
from fedveil.training.local import remembers

if TYPE_CHECKING:
    from fedveil.accounting.learnability import Learnability
    from fedveil.data.dataset import Dataset
    from fedveil.experiment.config import Config
    from fedveil.experiment.public_setting import Population
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting


@runtime_checkable
class _HasVariant(Protocol):
    @property
    def variant(self) -> str: ...


def certify_config(config: Config, data: Dataset | None = None) -> Statement:
    """Return the statement of a configuration, from the data catalogue alone: nothing is loaded or trained.

    Args:
        data: will be passed in to `run`; only public facts about them are used.

    Raises:
        ConfigError: as `certify`.
    """
    from fedveil.experiment.public_setting import by_own_clients, population_of, with_model_facts

    config = config if data is None else config.model_copy(update={"data": by_own_clients(config.data, data)})
    population = population_of(config, data)
    return certified(with_model_facts(config, population.data) if config.model.needs_building else config, population)


def certified(config: Config, population: Population) -> Statement:
    """Return the statement of a configuration, given the public facts about the clients.

    Raises:
        ConfigError: as `certify`.
    """
    from fedveil.experiment.public_setting import calibrated_setting

    return certify(
        *calibrated_setting(config, population),
        seeded_noise=config.run.seeded_noise,
        allow_vacuous_delta=config.privacy.allow_vacuous_delta,
        batch_norm=config.model.keeps_statistics,
        public=public_values(config, population.data),
        extra_disclosures=beside_the_releases(config),
    )


def certify(
    method: Method,
    setting: Setting,
    *,
    seeded_noise: bool = False,
    allow_vacuous_delta: bool = False,
    batch_norm: bool | None = None,
    public: tuple[Assumption, ...] = (),
    extra_disclosures: tuple[str, ...] = (),
) -> Statement:
    """Return claimed and proven epsilon of a configuration in all three views, with their assumptions and limits.

    Args:
        setting: calibrated, or with a target epsilon to calibrate to.
        seeded_noise: whether the noise comes from the seed. batch_norm: whether the network has batch statistics; None if
            unknown. Clients store these, so only False makes them memoryless.
        public: values assumed to be public (see `public_values`). extra_disclosures: see `beside_the_releases`.
        allow_vacuous_delta: allow a proven run delta >= 1 / units.

    Raises:
        ConfigError: unknown noise, or an impossible combination (see `fedveil.statement.scope_checks`).
    """
    check_selection(method, setting)
    check_noise_cohort(method, setting)
    check_shares(method, setting)
    s = setting if setting.noise_multiplier is not None else method.calibrate(setting)
    check_weights(method, s)
    check_groups(method, s)
    variant = method.variant if isinstance(method, _HasVariant) else "proven"
    released = {view: _releases(method, s, view) for view in VIEWS}
    memoryless = not remembers(method.client(s)) and batch_norm is False
    views, accountants = _numbers(method, s, released, memoryless=memoryless)
    proven = views[VIEWS.index(s.scope.view)].proven
    check_evaluation(method, s, proven)
    if variant == "proven" and proven.epsilon < math.inf:
        scope_checks.check_delta(s.delta, caveats.units(s), s.scope.unit, allow_vacuous_delta=allow_vacuous_delta)
    assumed = [a for v in views for a in _assumptions(method, s, v.view, released[v.view], v.proven.epsilon)]
    assumed += public
    shares = _shares(method, s, released[s.scope.view], proven.epsilon)
    return Statement(
        method=method.name,
        variant=variant,
        scope=s.scope,
        delta=s.delta,
        target_epsilon=s.epsilon,
        noise_multiplier=s.noise_multiplier,
        accountant=accountants[s.scope.view],
        clients=s.clients,
        cohort=s.cohort,
        rounds=s.rounds,
        sampling=s.sampling,
        dimension=s.layout.dimension,
        units=caveats.units(s),
        views=_claimed(method, s, views),
        assumptions=tuple(dict.fromkeys(assumed)),
        not_protected=caveats.not_protected(method, s, proven, batch_norm=batch_norm),
        warnings=(*caveats.warnings(method, s, proven, seeded_noise=seeded_noise, batch_norm=batch_norm), *extra_disclosures),
        notes=(*caveats.notes(method, s, proven, released[s.scope.view], memoryless=memoryless), *caveats.shares_notes(shares)),
        learnability=_learnability(method, s, proven.epsilon),
        shares=shares,
        groups=_groups(method, s),
    )


def _shares(method: Method, s: Setting, events: list[Event], proven: float) -> NoiseShares | None:
    """Return how the noise is added in shares, and epsilon for more colluders, at the size of a set at which they gain most."""
    if s.noise_place == "sum":
        return None

    def bound(bad: int) -> float:
        sizes = range(s.least_set, s.cohort + 1)
        lost = max((k - s.known_shares) / max(k - bad, 1) for k in sizes)  # of a set of k: an honest client knows no other's
        costs = [replace(event, mu=event.mu * math.sqrt(lost)) for event in events if isinstance(event, Gaussian)]
        if len(costs) < len(events) or math.isinf(proven):
            return math.inf
        return charged_bound(costs, s.delta, run_variation(method, s), s.scope.adjacency)[0]

    known = s.known_shares
    return NoiseShares(
        s.secure_aggregation, known, s.least_set, s.spares, max(bound(2 * known), proven), max(bound(s.cohort - 1), proven)
    )


def _learnability(method: Method, s: Setting, proven: float) -> Learnability | None:
    """Return noise against signal; without advice for a selected run, since the advice prices runs that stand alone."""
    if math.isinf(proven):
        return None
    figures = learnability(method, s, s.epsilon if s.epsilon is not None else proven)
    return figures if figures is None or s.selection is None else replace(figures, advice=())


def _groups(method: Method, s: Setting) -> tuple[GroupNumbers, ...]:
    """Return the proven numbers for the clients of each cap."""
    numbers_of_groups = []
    for group in s.groups:
        one = s.of_group(group)
        numbers, _ = _proven(method, one, s.scope.view, _releases(method, one, s.scope.view), memoryless=False)
        numbers_of_groups.append(GroupNumbers(numbers.proven.epsilon, len(group.clients), numbers.releases))
    return tuple(numbers_of_groups)


def _releases(method: Method, s: Setting, view: View) -> list[Event]:
    """Return the events seen in a view; unbounded, with the reason, for a view other than the run's that is not supported."""
    try:
        events = run_releases(method, s, view)
    except ConfigError as problem:
        if view is s.scope.view:
            raise
        return [Unbounded(str(problem))]
    scope_checks.check_sampling_credit(
        events,
        replace(s.scope, view=view),
        poisson=s.sampling == "poisson",
        rate=s.rate,
        records_sampled=s.example_clip is not None,
        noise_in_shares=s.scope.view is View.SERVER,
    )
    return events


def _numbers(
    method: Method, s: Setting, released: dict[View, list[Event]], *, memoryless: bool
) -> tuple[list[ViewNumbers], dict[View, str]]:
    """Return proven epsilons; a view inherits a better bound of a view that sees more (post-processing)."""
    views: list[ViewNumbers] = []
    accountants: dict[View, str] = {}
    for view in VIEWS:
        events = released[view]
        same = next((v for v in views if released[v.view] == events), None)
        if same is not None:
            numbers, accountants[view] = same, accountants[same.view]
        else:
            numbers, accountants[view] = _proven(method, s, view, events, memoryless=memoryless)
        if views and views[-1].proven.epsilon < numbers.proven.epsilon:
            numbers, accountants[view] = views[-1], accountants[views[-1].view]
        views.append(replace(numbers, proven=replace(numbers.proven, scope=replace(s.scope, view=view))))
    return views, accountants


def _proven(method: Method, s: Setting, view: View, events: list[Event], *, memoryless: bool) -> tuple[ViewNumbers, str]:
    pair = scope_checks.neighbouring_pair(s.scope, per_example=s.example_clip is not None)
    epsilon, accountant = charged_bound(events, s.delta, run_variation(method, s), pair, s.selection)
    reasons = dict.fromkeys(event.reason for event in events if isinstance(event, Unbounded))
    assumed = _assumptions(method, s, view, events, epsilon)
    reason = "; ".join(reasons) or ("the cost has no finite bound at this delta" if math.isinf(epsilon) else "")
    proven = Guarantee(epsilon, s.delta, replace(s.scope, view=view), accountant, tuple(a.what for a in assumed), reason)
    planned = tuple(PlannedRelease(*event_columns(event)) for event in events)
    if s.selection is not None and s.selection.shape is not None:
        return ViewNumbers(proven, tpr=tpr_of(epsilon, s.delta, FPR), releases=planned), accountant
    events = events if s.selection is None else s.selection.every(events)
    tpr = largest_tpr(events, epsilon, s.delta, FPR, adjacency=pair)
    seen_count = seen_count_epsilon(s, events, epsilon, memoryless=memoryless) if epsilon < math.inf else None
    return ViewNumbers(proven, mu=exact_mu(events), tpr=tpr, seen_count=seen_count, releases=planned), accountant


def _assumptions(method: Method, s: Setting, view: View, events: list[Event], epsilon: float) -> list[Assumption]:
    """Return the assumptions of one view's bound, or none if nothing is proven."""
    if math.isinf(epsilon):
        return []
    return [*caveats.assumptions(method, s, view, events), *caveats.ideal_noise(run_variation(method, s), epsilon, s.delta)]


def _claimed(method: Method, s: Setting, views: list[ViewNumbers]) -> tuple[ViewNumbers, ...]:
    claim = method.claim(s)
    return tuple(replace(v, claimed=claim) if claim is not None and claim.scope.view is v.view else v for v in views)


_ROUNDS = (0.25, 0.5, 1.0, 2.0)
_COHORTS = (0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True)
class PlannedRow:
    """One way to spend the guarantee.

    Args:
        unit, rounds, cohort: of the plan. noise_multiplier: required. gathered: R, noise against signal over all steps.
        share: of the accuracy above chance that may remain (see `expected_share`). why_not: reason why it is impossible, or
            empty.
    """

    unit: Unit
    rounds: int
    cohort: int
    noise_multiplier: float = float("nan")
    gathered: float = float("nan")
    share: float = float("nan")
    why_not: str = ""


def plan_table(config: Config) -> tuple[PlannedRow, ...]:
    """Return plans with rounds and cohorts around the configured ones, at client and record level, best first.

    Raises:
        ConfigError: privacy.epsilon is not set, or the method clips nothing.
    """
    method, s = method_of(config), setting_of(config, population_of(config))
    if s.epsilon is None:
        raise ConfigError("a plan needs the guarantee that it is made for: set privacy.epsilon")
    rows = [_row(method, one) for one in _ways(s, config.training.example_clip)]
    return tuple(sorted(rows, key=lambda row: (bool(row.why_not), row.gathered)))


def _ways(s: Setting, example_clip: float) -> Iterator[Setting]:
    rounds = sorted({max(1, round(s.rounds * factor)) for factor in _ROUNDS})
    cohorts = sorted({min(s.clients, max(1, round(s.cohort * factor))) for factor in _COHORTS} | {s.clients})
    for t, n in product(rounds, cohorts):
        scope = replace(s.scope, unit=Unit.CLIENT)
        secret = n < s.clients and scope.view is not View.SERVER and s.noise_place == "sum"
        sampling: Literal["poisson", "fixed"] = "poisson" if secret else "fixed"
        yield replace(s, rounds=t, cohort=n, sampling=sampling, scope=scope, example_clip=None)
        if s.task.by_example:
            scope = replace(s.scope, unit=Unit.RECORD)
            yield replace(s, rounds=t, cohort=n, sampling="fixed", scope=scope, example_clip=example_clip, noise_place="sum")


def _row(method: Method, s: Setting) -> PlannedRow:
    try:
        check_shares(method, s if s.noise_place == "shares" else replace(s, spare_attempts=None, secure_aggregation="none"))
        calibrated = method.calibrate(s)
        level, steps = own_level(method, calibrated)
    except ConfigError as problem:
        return PlannedRow(s.scope.unit, s.rounds, s.cohort, why_not=str(problem))
    assert level.ratio is not None
    gathered = gathered_ratio(level.ratio, steps)
    return PlannedRow(s.scope.unit, s.rounds, s.cohort, calibrated.z, gathered, expected_share(gathered))
