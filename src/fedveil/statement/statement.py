"""The privacy statement: claimed, proven and audited, for each view, with everything needed to read the numbers rightly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from fedveil.accounting.learnability import Learnability
from fedveil.accounting.types import Adjacency, Audit, Claim, Guarantee, Scope, Unit, View
from fedveil.errors import ConfigError

SIMULATION_ONLY = "simulation only: noise is reproducible, no privacy"
VIEWS = (View.SERVER, View.AGGREGATE, View.FINAL)
"""The views, ordered from the adversary who sees most to the one who sees least."""
FPR = 0.05
"""The false-positive rate at which `ViewNumbers.tpr` is quoted."""


@dataclass(frozen=True)
class Assumption:
    """An assumption of a bound, and why it is needed."""

    what: str
    why: str


@dataclass(frozen=True)
class PlannedRelease:
    """Planned releases of one kind in one view, as columns of a ledger (docs/ledger.md); the proven epsilon follows from them."""

    event: str
    mu: float | None
    rate: float | None
    noise_multiplier: float | None
    count: int
    reason: str | None


@dataclass(frozen=True)
class ViewNumbers:
    """The three numbers of one view.

    Args:
        proven: an upper bound, inf with its reason. claimed: by the paper, for this view. audits: lower bounds from attacks.
        mu: exact Gaussian-DP parameter when all releases are plain Gaussians, else None.
        tpr: largest true-positive rate of any test for one unit at a false-positive rate of 5 %.
        seen_count: epsilon where the number of participants of each round is seen, if that is over 1 % more than proven.
        releases: what the proven epsilon is computed from.
    """

    proven: Guarantee
    claimed: Claim | None = None
    audits: tuple[Audit, ...] = ()
    mu: float | None = None
    tpr: float = 1.0
    seen_count: float | None = None
    releases: tuple[PlannedRelease, ...] = ()

    @property
    def view(self) -> View:
        return self.proven.scope.view

    @property
    def audited(self) -> Audit | None:
        """The most telling audit: rigorous before estimated, then the largest epsilon."""
        return max(self.audits, key=lambda audit: (audit.rigorous, audit.epsilon), default=None)


@dataclass(frozen=True)
class GroupNumbers:
    """Clients with the same cap: their number, the epsilon proven for each in the run's own view, and the planned releases."""

    epsilon: float
    clients: int
    releases: tuple[PlannedRelease, ...] = ()


@dataclass(frozen=True)
class NoiseShares:
    """Noise that clients add in shares, and what the promise is worth if more of them work together than it counts on.

    Args:
        masks: whether pairwise masks hide the clients' vectors from the server; in a `simulate` run, all clients are one process.
        colluders: c, clients that may work together, or with the server. least: m, the smallest set whose sum is opened.
        spare: priced releases beyond the rounds. twice: epsilon if 2c work together. others: if all other clients do.
    """

    masks: Literal["none", "simulate", "on"]
    colluders: int
    least: int
    spare: int
    twice: float
    others: float


@dataclass(frozen=True)
class Contradiction:
    """An audit above a number that should be above it."""

    number: Literal["claimed", "proven"]
    against: Claim | Guarantee
    audit: Audit

    @property
    def label(self) -> str:
        """REFUTED by a rigorous audit; IN DOUBT when the audit is an estimate."""
        return "REFUTED" if self.audit.rigorous else "IN DOUBT"

    def __str__(self) -> str:
        return f"{self.label}: {self.number} {self.against}, but an audit found {self.audit}"


@dataclass(frozen=True)
class Statement:
    """The privacy statement of a run: its guarantee, the adversary, the assumptions, and what is not protected.

    Args:
        scope, delta: of the promise. target_epsilon: asked for in that scope, or None when the noise was given.
        noise_multiplier: noise std / clip of what is released, or None where the method has none.
        accountant: what computed the proven epsilon of the run's own view.
        clients, cohort, rounds, sampling, dimension: N, n, T, how n are drawn, d. units: how many units of privacy there are.
        views: server, aggregate, final. notes: remarks on how to read the numbers.
        shares: how clients add the noise in shares, or None if it is added once.
        groups: of clients with caps of their own, smallest first; all other numbers are those of the last, the largest.
    """

    method: str
    variant: str
    scope: Scope
    delta: float
    target_epsilon: float | None
    noise_multiplier: float | None
    accountant: str
    clients: int
    cohort: int
    rounds: int
    sampling: str
    dimension: int
    units: int
    views: tuple[ViewNumbers, ...]
    assumptions: tuple[Assumption, ...] = ()
    not_protected: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    learnability: Learnability | None = None
    groups: tuple[GroupNumbers, ...] = ()
    shares: NoiseShares | None = None

    def __post_init__(self) -> None:
        if tuple(numbers.view for numbers in self.views) != VIEWS:
            raise ConfigError(
                f"a statement has the views server, aggregate and final in this order, got {[v.view for v in self.views]}"
            )
        for numbers in self.views:
            proven = numbers.proven
            if (proven.scope.unit, proven.scope.adjacency, proven.delta) != (self.scope.unit, self.scope.adjacency, self.delta):
                raise ConfigError(
                    f"proven epsilons of one statement share unit, adjacency and delta; {proven} does not fit {self.scope}"
                )

    def view(self, view: View) -> ViewNumbers:
        return self.views[VIEWS.index(view)]

    @property
    def own(self) -> ViewNumbers:
        """The numbers of the view that the run promises."""
        return self.view(self.scope.view)

    @property
    def proven(self) -> Guarantee:
        """The proven guarantee of the run's own scope."""
        return self.own.proven

    @property
    def claimed(self) -> Claim | None:
        """The paper's claim, whatever its scope."""
        return next((numbers.claimed for numbers in self.views if numbers.claimed), None)

    def with_audits(self, audits: Iterable[Audit]) -> Statement:
        """Return the statement with these audits added to their views."""
        added = tuple(audits)
        views = tuple(replace(v, audits=(*v.audits, *(a for a in added if a.scope.view is v.view))) for v in self.views)
        return replace(self, views=views)

    def contradictions(self) -> tuple[Contradiction, ...]:
        """Return each claimed or proven number that an audit of the same or a weaker adversary exceeds, largest audit first."""
        audits = sorted((a for v in self.views for a in v.audits), key=lambda a: (not a.rigorous, -a.epsilon))
        found = []
        for numbers in self.views:
            bounds: list[tuple[Literal["claimed", "proven"], Claim | Guarantee]] = [("proven", numbers.proven)]
            if numbers.claimed is not None:
                bounds.insert(0, ("claimed", numbers.claimed))
            for name, against in bounds:
                worst = next((audit for audit in audits if exceeds(audit, against)), None)
                if worst is not None:
                    found.append(Contradiction(name, against, worst))
        return tuple(found)

    def contradiction(self, view: View, number: Literal["claimed", "proven"]) -> Contradiction | None:
        """Return the contradiction of one number of one view, or None."""
        found = (c for c in self.contradictions() if c.number == number and c.against.scope.view is view)
        return next(found, None)


def exceeds(audit: Audit, bound: Claim | Guarantee) -> bool:
    """Return whether the audit contradicts the bound: larger epsilon at no smaller delta, for a scope that the bound covers."""
    return covers(bound.scope, audit.scope) and audit.delta >= bound.delta and audit.epsilon > bound.epsilon


def covers(promised: Scope, other: Scope) -> bool:
    """Return whether an (epsilon, delta) proven for the first scope holds for the second as well.

    A view covers the views that see less (post-processing). At client level, replace-one covers zero-out (a client may
    contribute nothing) and every change of a single record.
    """
    if VIEWS.index(promised.view) > VIEWS.index(other.view):
        return False
    if promised.unit is Unit.CLIENT and promised.adjacency is Adjacency.REPLACE_ONE:
        return True
    return (promised.unit, promised.adjacency) == (other.unit, other.adjacency)
