"""The public setting of a run: everything that a method may use before the data are touched."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from fedveil.accounting.selection import Selection
from fedveil.accounting.types import Scope, View
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import DpSgd
from fedveil.release.release_layout import EvaluationCounts
from fedveil.tasks.classification import SCORE_EDGES, Classification, counts_scores
from fedveil.tasks.task import Task
from fedveil.training.local import LocalSpec
from fedveil.training.optimizer import OptimizerSpec
from fedveil.training.params import Layout

FinalModel = Literal["last", "tail", "ema"]
NoisePlace = Literal["sum", "shares"]
SecureAggregation = Literal["none", "simulate", "on"]


@dataclass(frozen=True)
class BudgetGroup:
    """Clients with the same cap (server view): the cap's epsilon, their numbers, and the calibrated noise multiplier."""

    epsilon: float
    clients: frozenset[int]
    noise_multiplier: float


@dataclass(frozen=True)
class NoiseCohort:
    """Larger federation whose noise is simulated: its clients, clients per round, and epsilon."""

    clients: int
    clients_per_round: int
    epsilon: float


@dataclass(frozen=True)
class Setting:
    """Public configuration of a run: everything that a method may use before the data are touched.

    Args:
        clients: N. cohort: n, clients per round (expected number under Poisson sampling). rounds: T.
        sampling: `fixed`, n of N without replacement; `poisson`, each client joins with probability n / N.
        records: nominal examples per client, |D| / N; 0 if the configuration does not determine it (see `known_records`).
        layout: of the flat model; its dimension is d.
        epsilon, delta: the target, or epsilon None. noise_multiplier: z, noise std / clip of a release; None before calibration.
        example_clip: per-example L2 clip if local training is DP-SGD (record level), else None.
        min_survivors: guaranteed number of noisy uploads in the sum of a round. colluders: number of them that belong to the
            adversary; see `unknown_noises_in` for the noise that any client knows.
        noise_place: whether the noise of a sum is added once, or in shares by the clients of the round (`in_shares`).
        spare_attempts: as configured, or None; see `spares`.
        secure_aggregation: whether pairwise masks hide the clients' vectors, here or in a deployment.
        max_participations: rounds in which one client may take part, or None for all T.
        server: optimiser of the server for the aggregated step; SGD at rate 1 applies it unchanged.
        groups: clients by cap, if the method gives them individual caps; `epsilon` and `noise_multiplier` are then those of the
            largest cap.
        task: the learning task, with its public constants.
        final_model: the model that the run returns (see `fedveil.federation.evaluation`).
        selection: how the run was chosen among others of equal price, or None for a single run.
        grid_bits: of the released grid, if it differs from that of the method's mechanism; it costs no privacy.
        evaluation: counts released with each update, or None; see `counts_shape`.
        noise_cohort: the larger federation that the noise is calibrated for, an extrapolation; None for this federation.
        public_split: whether a part of the training set is public and belongs to no client.
        clipped_at: where an update is clipped: by the client's software, or by a server that is trusted with the updates.
        divided_by: the option that divides the records by their classes, or in an unknown way, or an empty string.
    """

    clients: int
    cohort: int
    rounds: int
    sampling: Literal["fixed", "poisson"]
    local: LocalSpec
    layout: Layout
    records: int
    classes: int
    scope: Scope
    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    example_clip: float | None = None
    min_survivors: int | None = None
    colluders: int = 0
    noise_place: NoisePlace = "sum"
    spare_attempts: int | None = None
    secure_aggregation: SecureAggregation = "none"
    max_participations: int | None = None
    server: OptimizerSpec = field(default_factory=lambda: OptimizerSpec(lr=1.0))
    groups: tuple[BudgetGroup, ...] = ()
    task: Task = field(default_factory=Classification)
    final_model: FinalModel = "last"
    selection: Selection | None = None
    grid_bits: int | None = None
    evaluation: EvaluationCounts | None = None
    noise_cohort: NoiseCohort | None = None
    public_split: bool = False
    divided_by: str = ""
    clipped_at: Literal["client", "server"] = "client"

    def of(self, client: int) -> Setting:
        """Return the setting of one client, with the target and the noise of its group."""
        return next((self.of_group(group) for group in self.groups if client in group.clients), self)

    def of_group(self, group: BudgetGroup) -> Setting:
        """Return the setting in which all clients have the cap of a group."""
        return replace(self, epsilon=group.epsilon, noise_multiplier=group.noise_multiplier, groups=())

    @property
    def rate(self) -> float:
        """Return q = n / N, the probability that a given client takes part in a round."""
        return self.cohort / self.clients

    @property
    def participations(self) -> int:
        """Return the largest number of rounds of one client, and the spare attempts."""
        return min(self.rounds, self.max_participations or self.rounds) + self.spares

    @property
    def spares(self) -> int:
        """Return the number of releases beyond the rounds that are priced, since attempts may fail; by default T / 20."""
        if self.noise_place == "sum":
            return 0
        return self.spare_attempts if self.spare_attempts is not None else max(2, math.ceil(self.rounds / 20))

    @property
    def known_shares(self) -> int:
        """Return c, the number of noise shares of a sum that an adversary who sees the sums knows: at least its own."""
        return max(self.colluders, 1)

    @property
    def least_set(self) -> int:
        """Return m, the smallest set whose sum is opened under secure aggregation: by default half of a round's clients."""
        return self.min_survivors or max(self.known_shares + 2, math.ceil(self.cohort / 2))

    @property
    def update_noise(self) -> float:
        """Return the factor on z in the noise of updates: above 1 if evaluation counts take a share of each release."""
        return 1.0 if self.evaluation is None else (1 - self.evaluation.share) ** -0.5

    @property
    def sum_noise(self) -> float:
        """Return the factor on z in the noise of a sum: `update_noise`, and the shares that count as known."""
        n = self.cohort
        return self.update_noise * (1.0 if self.noise_place == "sum" else math.sqrt(n / max(n - self.known_shares, 1)))

    @property
    def counts_shape(self) -> tuple[int, ...]:
        """Return the shape of the counts: [right, wrong], or the number of scores in each bin, for class 0 and class 1."""
        return (2, len(SCORE_EDGES) + 1) if counts_scores(self.task) else (2,)

    @property
    def tail_rounds(self) -> int:
        """Return the number of last rounds in a tail average: a third of all rounds."""
        return max(1, round(self.rounds / 3))

    @property
    def steps(self) -> int:
        """Return K, the local steps per round of a client with the nominal number of examples."""
        return self.local.steps_for(1 if self.local.steps is not None else self.known_records)

    @property
    def known_records(self) -> int:
        """Return `records`, at least 1.

        Raises:
            ConfigError: the configuration does not determine it.
        """
        if not self.records:
            raise ConfigError(
                "how many examples a client has depends on how the files of these data were prepared, and the noise or the "
                "claim of this configuration depends on that number: hand the data over, as in fv.certify(config, data=...), "
                "read the statement of the run, or fix the number: data.partition.kind = 'iid' with examples_per_client"
            )
        return self.records

    def unknown_noises_in(self, view: View) -> int:
        """Return the number of noises in a sum of noisy uploads that an adversary with this view does not know.

        A client that sees the sums knows the noise that it drew itself, so one noise counts as known even without collusion. An
        outsider who sees the last model knows only the noises of colluders. The server sees single uploads.

        Raises:
            ConfigError: the number of uploads is not guaranteed, or all of their noises count as known.
        """
        if view is View.SERVER:
            return 1
        if self.min_survivors is None and self.sampling == "poisson":
            raise ConfigError(
                "noise added in shares by each client needs a guaranteed number of survivors under Poisson sampling: "
                "set privacy.min_survivors, or training.sampling = 'fixed'"
            )
        fixed = self.min_survivors is None or self.noise_place == "shares"  # shares are made for the set as it is
        survivors = self.cohort if fixed else self.min_survivors or 0
        known_noises = self.colluders if view is View.FINAL else self.known_shares
        if survivors > known_noises:
            return survivors - known_noises
        if self.scope.view is View.SERVER:  # each upload is protected by its own noise alone
            return 1
        least = "training.clients_per_round" if self.min_survivors is None else "privacy.min_survivors"
        one = "" if self.colluders else ", where one counts as known: that which a fellow client drew itself"
        raise ConfigError(
            f"{least} ({survivors}) must exceed privacy.colluders ({self.colluders}){one}: no noise would be left in the sum "
            "to hide a client; take more clients per round, or privacy.view = 'server', where each upload has all its noise"
        )

    @property
    def can_share(self) -> bool:
        """Return whether the number of noisy uploads in a sum is known."""
        return self.sampling == "fixed" or self.min_survivors is not None

    @property
    def amplified(self) -> bool:
        """Return whether secret Poisson sampling may be credited; a skipped round would reveal the number of participants."""
        return self.sampling == "poisson" and self.max_participations is None and self.min_survivors is None

    @property
    def z(self) -> float:
        """Return the noise multiplier; raise ConfigError before calibration."""
        if self.noise_multiplier is None:
            raise ConfigError("the noise is not set: give privacy.epsilon or privacy.noise_multiplier")
        return self.noise_multiplier

    def dp_sgd(self) -> DpSgd | None:
        """Return the DP-SGD plan of one round, or None; its rate and steps use the nominal size, so all clients have the same."""
        if self.example_clip is None:
            return None
        records = self.known_records
        rate = min(1.0, self.local.batch_size / records)
        return DpSgd(self.example_clip, self.z, rate, self.steps, rate * records, self.example_cap)

    @property
    def example_cap(self) -> int:
        """Return the number of a client's examples that can join the batches of DP-SGD; later examples never do."""
        records = max(self.records, 1)
        return max(records, min(100 * records, 2**17))
