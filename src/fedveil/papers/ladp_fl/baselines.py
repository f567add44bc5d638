"""Baselines of LaDP-FL with the classical Gaussian mechanism: NbAFL, Sensitive DP, Adap DP-FL.

NbAFL, published: the noise assumes a sensitivity 2 C / n_min, which trained weights do not have. Proven: the same clipped weights
with their true sensitivity, C under zero-out and 2 C under replace-one, composed exactly.

Sensitive DP, published: the history is raw and bounds nothing, so nothing is proven. Proven: the history consists of noisy
releases, and the next update is clipped to the estimate, so that the estimate is the sensitivity.

Adap DP-FL adapts to public values only: the clip follows the norm of releases, the noise follows the loss on public examples. So
the published variant is proven too; the proven variant subtracts the noise from the norm, which could drive the clip up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.accountant import bound
from fedveil.accounting.gaussian import classical_noise_multiplier, epsilon_of
from fedveil.accounting.types import Adjacency, Claim, SampledGaussian, Scope, Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.cost import step_sensitivity
from fedveil.mechanism.plan import DpSgd, LocalDpSgd, Plan, Released, UnprovenPlan, Upload, step_of
from fedveil.methods.base import (
    Fixed,
    Mean,
    MethodConfig,
    Policy,
    Release,
    Setting,
    Summed,
    SumServer,
    Unproven,
    Variant,
    as_trained,
    calibrated,
    gaussian_plan,
    mean,
    reads_public_split,
    sum_noise,
)
from fedveil.methods.shared import ClipRange, TwoVariants, debiased_norms, first_clips, paper_epsilon
from fedveil.papers.ladp_fl.claim import claimed_total, nbafl_broadcast_std, nbafl_upload_std, sensitivity_theorem2
from fedveil.training.local import Client, Local, Plain, Proximal, Remembering, State

if TYPE_CHECKING:
    from torch import Tensor


def training_reach(s: Setting, method: str, moves: int | None = None, *, momentum: bool = False) -> float:
    """Return 2 eta M G_c, the largest distance of two models after M SGD steps on gradients clipped to G_c.

    Args:
        moves: M; None counts epochs, as LaDP-FL's Theorem 2 does.
        momentum: whether the method covers momentum mu. The velocity is then at most G_c (1 + mu + mu^2 + ...), and the distance
            is multiplied by 1 / (1 - mu).

    Raises:
        ConfigError: the bound does not cover this kind of training.
    """
    optimizer, clip = s.local.optimizer, s.local.batch_clip
    if clip is None or optimizer.name != "sgd" or optimizer.weight_decay or (optimizer.momentum and not momentum):
        steps, without = ("SGD steps", "weight_decay") if momentum else ("plain SGD steps", "momentum or weight_decay")
        raise ConfigError(
            f"the published variant of {method} bounds {steps} on clipped gradients: set training.batch_clip (G_c), "
            f"and training.optimizer to sgd without {without}"
        )
    return sensitivity_theorem2(optimizer.lr, s.local.epochs if moves is None else moves, clip) / (1 - optimizer.momentum)


def full_dp_std(s: Setting, method: str) -> float:
    """Return sqrt(2 ln(1.25 / delta)) 2 eta E G_c / epsilon, LaDP-FL's Full DP: equal noise on all weights in all rounds."""
    return classical_noise_multiplier(paper_epsilon(s, method), s.delta) * training_reach(s, method)


def classical_scope(adjacency: Adjacency = Adjacency.REPLACE_ONE) -> Scope:
    """Return the scope that a method claims: a record in the server view; the baselines' own papers replace it."""
    return Scope(Unit.RECORD, adjacency, View.SERVER)


def sequential_claim(s: Setting, total: float, source: str) -> Claim:
    """LaDP-FL's accountant: q times the sum of the rounds' epsilons at q T delta; one round's epsilon if that delta is >= 1.

    The paper's neighbours delete or replicate one instance (footnote 1), which changes the data by one contribution: zero-out.

    Args:
        total: the sum of the rounds' epsilons. source: the source of the epsilon of a round.
    """
    scope = classical_scope(Adjacency.ZERO_OUT)
    rate = min(1.0, s.local.batch_size / s.known_records)
    epsilon, delta = claimed_total(total / s.rounds, s.delta, s.rounds, rate)
    if delta >= 1:
        note = f"one round; over {s.rounds} rounds the paper's accountant gives epsilon = {epsilon:.4g} at a vacuous delta >= 1"
        return Claim(total / s.rounds, s.delta, scope, source, note)
    return Claim(epsilon, delta, scope, f"{source} and Section XIII", f"q T epsilon with q = {rate:.4g}")


_REASONS = {
    "paper": "its sensitivity 2 C / n_min takes a minimiser of a mean for a mean of minimisers; trained weights have 2 C (NbAFL)",
    "repo": "weights are not clipped before they are noised, so their sensitivity has no bound (NbAFL as in FederatedScope)",
    "ladp-fl": "its sensitivity counts epochs where steps move the weights, and updates are not clipped (Full DP of LaDP-FL)",
}
_LARGEST_MU = 1e3


class NbAFL(TwoVariants):
    """Noise before aggregation: clipped weights and classical Gaussian noise, "Full DP" of LaDP-FL.

    Args:
        variant: published or proven.
        source: published; of the noise. `paper`: c L (2 C / n_min) / epsilon on weights clipped to C. `repo`: c T C / (n epsilon)
            on weights that are not clipped; the server clamps each coordinate of its model to C. `ladp-fl`: LaDP-FL's baseline,
            c 2 eta E G_c / epsilon in each round, with the gradients clipped (`training.batch_clip`) and the weights not.
        clip: C, bound on the norm of a client's weights (`repo`: on each coordinate). The paper uses the median of their norms,
            which reads raw data.
        exposures: L, uploads of a client that an eavesdropper sees; None for all T rounds, where the server adds no noise.
        proximal: mu of the penalty mu/2 ||w_i - w||^2 of local training.
    """

    name: Literal["nbafl"] = "nbafl"
    proven_difference: ClassVar[str] = (
        "the noise is that of the clipped weights' own sensitivity, which does not fall with the number of examples"
    )
    reconstructed: ClassVar[str] = (
        "source = 'paper', from notes on Wei et al. 2020, and 'ladp-fl', from LaDP-FL's Theorems 1 and 2; 'repo' was read in "
        "FederatedScope's trainer_nbafl.py"
    )
    source: Literal["paper", "repo", "ladp-fl"] = "paper"
    clip: float = Field(5.0, gt=0, allow_inf_nan=False)
    exposures: int | None = Field(None, ge=1)
    proximal: float = Field(0.0, ge=0, allow_inf_nan=False)

    @property
    def unproven(self) -> str:
        return _REASONS[self.source]

    @property
    def sends_weights(self) -> bool:
        """Return whether clients release weights, and not their difference from the global model."""
        return self.variant == "proven" or self.source != "ladp-fl"

    def calibrate(self, s: Setting) -> Setting:
        """Proven: noise for the configured epsilon. Published: noise from the formula."""
        if self.sends_weights and (s.sampling == "poisson" or (s.min_survivors or s.cohort) < s.cohort):
            raise ConfigError(
                "nbafl averages weights, so their number must be fixed: set training.sampling = 'fixed', and leave "
                "privacy.min_survivors out"
            )
        return super().calibrate(s)

    def check_published(self, s: Setting) -> None:
        if (self.exposures or 1) > s.rounds:
            raise ConfigError(
                f"method.exposures = {self.exposures} is more than the {s.rounds} rounds: at most all uploads are seen"
            )
        self.noise_std(s)

    def release(self, s: Setting) -> Release:
        """The same clip and noise in every round."""
        if self.variant == "proven":
            return Fixed(gaussian_plan(s, self.clip))
        clip = self.clip if self.source == "paper" else math.inf
        return Fixed(UnprovenPlan(clip=clip, noise_std=self.noise_std(s), reason=self.unproven))

    def client(self, s: Setting) -> Client:
        """Local training with the proximal term, which releases weights."""
        penalty = Proximal(self.proximal) if self.proximal else None
        return Weights(penalty) if self.sends_weights else Plain(penalty)

    def server(self, s: Setting) -> SumServer:
        """Move the global model to the mean of the weights."""
        if not self.sends_weights:
            return Mean()
        return ToWeights(self.clip if self.variant == "published" and self.source == "repo" else None)

    def claim(self, s: Setting) -> Claim | None:
        """Published: epsilon for L uploads of the client of a record; as LaDP-FL's Full DP, epsilon per round."""
        if self.variant == "proven":
            return None
        epsilon = paper_epsilon(s, self.name)
        if self.source == "ladp-fl":
            return sequential_claim(s, s.rounds * epsilon, "LaDP-FL, Theorem 1")
        return Claim(epsilon, s.delta, classical_scope(), "NbAFL, Section III", self._sound(s))

    def _sound(self, s: Setting) -> str:
        """Return a sentence about the guarantee of the same noise with a valid sensitivity."""
        mu = 2 * self.clip * math.sqrt(s.rounds) / self.noise_std(s)
        if self.source == "repo":
            return "weights are not clipped before the noise"
        size = f"{epsilon_of(mu, s.delta):.4g}" if mu <= _LARGEST_MU else f"above {_LARGEST_MU**2 / 2:.2g}"
        return f"with the sensitivity 2 C of trained weights the noise of all rounds gives epsilon = {size}"

    def clip_norm(self, s: Setting) -> float | None:
        """Return C if the norm of the weights is clipped to it."""
        return self.clip if self.variant == "proven" or self.source == "paper" else None

    def noise_std(self, s: Setting) -> float:
        """Published: the noise std of an upload, including the noise that the server adds, so that the mean has both."""
        if self.source == "ladp-fl":
            return full_dp_std(s, self.name)
        epsilon, records = paper_epsilon(s, self.name), s.known_records
        exposures = s.rounds if self.exposures is None else self.exposures
        one = nbafl_upload_std(epsilon, s.delta, self.clip, records, 1)
        if self.source == "repo":
            own, added = s.rounds * one / 2, nbafl_broadcast_std(one, epsilon, s.cohort, s.rounds, s.clients, s.clients)
        else:
            own, added = exposures * one, nbafl_broadcast_std(one, epsilon, exposures, s.rounds, s.clients, s.cohort)
        return math.hypot(own, added * math.sqrt(s.cohort))


@dataclass(frozen=True)
class Weights(Plain):
    """Local training that releases its final weights."""

    def finish(self, local: Local) -> Tensor:
        """Return w_i, which the door clips."""
        return local.model.vector.clone()


@dataclass(frozen=True)
class ToWeights(SumServer):
    """Move the global model to the mean of released weights, each clamped to `bound` if given."""

    bound: float | None

    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, Tensor]:
        weights = total.vector if self.bound is None else total.vector.clamp(-self.bound, self.bound)
        return state, weights - total.start


class SensitiveDP(TwoVariants):
    """Noise that follows an estimate of the sensitivity from the history of updates.

    Args:
        variant: published or proven.
        memory: beta; squared norms are averaged with this weight on the past.
        own: zeta, the weight of a client's updates; the steps of the global model have weight 1 - zeta.
        headroom: kappa; the estimate is this multiple of the root of the average.
        clip: proven; C, the clip of the first round, divided among layers by the root of their sizes.
        clip_range: proven; the clips stay within these multiples of their start.
    """

    name: Literal["sensitive-dp"] = "sensitive-dp"
    proven_difference: ClassVar[str] = (
        "the sensitivity is estimated from noisy releases, by layer and not by coordinate, and the next update is clipped to "
        "the estimate"
    )
    reconstructed: ClassVar[str] = (
        "all equations, for SGD and momentum of the paper's four optimisers; that the sensitivity is estimated from local and "
        "global history is in the abstract"
    )
    reason: ClassVar[str] = "the noise follows raw updates, and their history bounds nothing (Sensitive DP)"
    memory: float = Field(0.9, ge=0, lt=1)
    own: float = Field(0.5, ge=0, le=1)
    headroom: float = Field(2.0, gt=0, allow_inf_nan=False)
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    clip_range: ClipRange = (0.1, 2.0)

    def check_published(self, s: Setting) -> None:
        training_reach(s, self.name, momentum=True)
        super().check_published(s)

    def release(self, s: Setting) -> Release:
        """Proven: clips from released norms. Published: the upload leaves as training made it."""
        return (
            Remembered(self) if self.variant == "proven" else Unproven(("norms of earlier updates",), self.unproven, as_trained)
        )

    def client(self, s: Setting) -> Client:
        """Proven: plain training. Published: noise by the raw history."""
        if self.variant == "proven":
            return Plain()
        multiplier = classical_noise_multiplier(paper_epsilon(s, self.name), s.delta)
        return RawHistory(method=self, multiplier=multiplier, reach=training_reach(s, self.name, momentum=True))

    def claim(self, s: Setting) -> Claim | None:
        """The accountant of LaDP-FL: epsilon in each round, summed."""
        if self.variant == "proven":
            return None
        return sequential_claim(s, s.rounds * paper_epsilon(s, self.name), "Sensitive DP (reconstructed), LaDP-FL, Theorem 1")

    def average(self, before: Tensor | None, square: Tensor) -> Tensor:
        """Return beta previous + (1 - beta) square; the square if there is no previous average."""
        return square if before is None else self.memory * before + (1 - self.memory) * square


@dataclass(frozen=True, kw_only=True)
class RawHistory(Plain, Remembering):
    """Published objective: noise of std c min(2 kappa sqrt(zeta a + (1 - zeta) b), 2 eta E G_c / (1 - mu)) / epsilon.

    a and b are running averages of squared norms: of the client's updates, and of the movement of the global model since the
    client's last round. Until both exist, the bound alone is used. Without a clip only the norm of the estimate matters, which is
    the same by coordinate and by layer.
    """

    method: SensitiveDP
    multiplier: float
    reach: float

    def finish(self, local: Local) -> Tensor:
        """Return the noisy update, and add the update to the history."""
        update, state, m = super().finish(local), local.state, self.method
        if "seen" in state:
            state["moved"] = m.average(state.get("moved"), (local.start - state["seen"]).square().sum())
        spread = self.reach
        if "own" in state and "moved" in state:
            square = m.own * state["own"] + (1 - m.own) * state["moved"]
            spread = min(2 * m.headroom * float(square) ** 0.5, self.reach)
        state["own"], state["seen"] = m.average(state.get("own"), update.square().sum()), local.start.clone()
        state["share"] = spread / self.reach
        std = self.multiplier * spread
        local.noised(update.new_tensor([std**2 * n for n in local.model.layout.sizes]))
        return update + std * local.noise(len(update))

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """Return the estimate as a share of the bound."""
        return {"estimate_share": state["share"]} if "share" in state else {}


@dataclass(frozen=True)
class Remembered(Policy):
    """Proven policy: the clip of a layer is kappa times the root mean square of its released norms, less their noise."""

    method: SensitiveDP

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        """Plan clips C_l from the history and one noise std z ||C||: the round costs f / z for all clips."""
        m = self.method
        clips = first = first_clips(m.clip, s.layout)
        if "own" in state:
            own: Tensor = state["own"]
            others: Tensor = released.server.get("own", own)
            estimate = m.headroom * (m.own * own + (1 - m.own) * others).sqrt()
            clips = estimate.clamp(first * m.clip_range[0], first * m.clip_range[1])
        return Plan(layer_clip=clips, noise_std=s.z * float(clips.double().norm()), place="sum" if sum_noise(s) else "upload")

    def observe(self, s: Setting, state: State, upload: Upload) -> State:
        """Update the average with the release."""
        return {"own": self.method.average(state.get("own"), debiased_norms(upload, s.layout).square())}

    def observe_all(self, s: Setting, state: State, uploads: Sequence[Upload]) -> State:
        """Update the average of the global model's steps, the means of the uploads."""
        if not uploads:
            return state
        step, layout = mean(uploads), s.layout
        weights = [u.weight / sum(other.weight for other in uploads) for u in uploads]
        noise = sum(w**2 * u.noise_std.square() for w, u in zip(weights, uploads, strict=True))
        square = layout.norms(step).square() - step.new_tensor([float(n) for n in layout.sizes]) * noise
        return {"own": self.method.average(state.get("own"), square.clamp_min(0))}


FALLS = 3
"""Number of consecutive decreases of the public loss before the noise is lowered."""


class AdapDPFL(MethodConfig):
    """DP-SGD on each client with a clip and a noise that follow the training (Adap DP-FL, Fu et al. 2022).

    The first clip is `training.example_clip`. The noise falls only where `data.public_fraction` gives a public loss.

    Args:
        variant: published or proven; both have a proven bound, and they differ in the norm that the clip follows.
        factor: published; alpha, the next clip is alpha times the norm of a step's released, noisy gradient.
        headroom: proven; the next clip is this multiple of that norm less its noise. It is the norm of a mean of clipped
            gradients, so with a headroom of 1 the clip could only shrink.
        decay: beta, the factor of the noise after three consecutive decreases of the public loss.
        clip_range: proven; the clip stays within these multiples of its start.
    """

    reconstructed: ClassVar[str] = (
        "the rules are read in notes about the paper, not in the paper: alpha = 1, beta about 0.999, three falls, and Renyi "
        "accounting; that the norm is read off the update of a round, not step by step, is ours"
    )
    name: Literal["adap-dp-fl"] = "adap-dp-fl"
    proven_difference: ClassVar[str] = (
        "the clip follows the norm of the release less the known power of its noise, and stays within a range of its start"
    )
    variant: Variant = "proven"
    factor: float = Field(1.0, gt=0, allow_inf_nan=False)
    decay: float = Field(0.999, gt=0, le=1)
    headroom: float = Field(10.0, gt=0, allow_inf_nan=False)
    clip_range: ClipRange = (0.1, 4.0)

    def calibrate(self, s: Setting) -> Setting:
        """Calibrate z, the least noise that the schedule can reach; each step is charged at it."""
        o = s.local.optimizer
        if s.example_clip is None:
            raise ConfigError("adap-dp-fl adapts DP-SGD inside the clients: set training.local = 'dp-sgd'")
        if o.name != "sgd" or o.momentum or o.weight_decay or s.local.schedule != "constant":
            raise ConfigError(
                "adap-dp-fl reads the norm of a gradient off plain SGD steps: set training.optimizer to sgd without momentum or "
                "weight_decay, and training.schedule = 'constant'"
            )
        return calibrated(self, s)

    def release(self, s: Setting) -> Release:
        return Following(self)

    def claim(self, s: Setting) -> Claim | None:
        """Published: the Renyi accountant over all steps, for one removed record."""
        step = s.dp_sgd()
        if self.variant == "proven" or step is None or s.z == 0:
            return None
        scope = Scope(Unit.RECORD, Adjacency.ZERO_OUT, View.SERVER)
        events = [SampledGaussian(step.rate, s.z, step.steps * s.participations)]
        epsilon, _ = bound(events, s.delta, accountant="rdp", adjacency=Adjacency.ZERO_OUT)
        return Claim(epsilon, s.delta, scope, "Adap DP-FL, Renyi accountant, reconstructed", "summed over all steps")

    def clip_norm(self, s: Setting) -> float | None:
        """Single gradients are clipped, updates are not."""
        return None

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """Return the assumption about the data that the noise follows."""
        return reads_public_split(s)


@dataclass(frozen=True)
class Following(Policy):
    """A clip per client from its own releases (aggregate view: one common clip), and one noise level from the public loss."""

    method: AdapDPFL

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        first = _first(s)
        server = state if sum_noise(s) else released.server
        left = _most(s) - int(server.get("lowered", 0))
        step = replace(first, clip=state.get("clip", first.clip), noise_multiplier=s.z * self.method.decay**-left)
        return LocalDpSgd(step=no_cheaper(step, first, s))

    def observe(self, s: Setting, state: State, upload: Upload) -> State:
        """Compute the next clip; in the aggregate view, use the public loss too."""
        new = {**state, "clip": self._clip(s, upload)}
        return _lowered(new, upload.public_loss) if sum_noise(s) else new

    def observe_all(self, s: Setting, state: State, uploads: Sequence[Upload]) -> State:
        """Server view: use the public loss, once per round."""
        return _lowered(state, uploads[0].public_loss) if uploads else state

    def _clip(self, s: Setting, upload: Upload) -> float:
        """Return a multiple of the norm of a step's gradient, computed from the update of K steps at rate eta.

        ||u / (eta K)||^2 is on average ||g||^2 + P / (K n), where P is the power of the noise in a step and n the clients in the
        mean; the norm of a noised gradient is sqrt(||g||^2 + P) (published).
        """
        m, step = self.method, step_of(upload.plan)
        assert step is not None
        first = _first(s).clip
        noise = s.layout.dimension * (step.noise_multiplier * step.clip / step.expected) ** 2
        clients = s.cohort if sum_noise(s) else 1
        seen = (float(upload.vector.norm()) / (s.local.optimizer.lr * step.steps)) ** 2
        clean = max(seen - noise / (step.steps * clients), 0.0)
        if m.variant == "published":
            return min(max(m.factor * math.sqrt(clean + noise), 1e-6 * first), 1e6 * first)
        return min(max(m.headroom * math.sqrt(clean), m.clip_range[0] * first), m.clip_range[1] * first)


def _first(s: Setting) -> DpSgd:
    step = s.dp_sgd()
    assert step is not None
    return step


def _most(s: Setting) -> int:
    """Return how often the noise can be lowered before the last round; first possible after rounds 0 to 3."""
    return max(0, s.rounds - 1 - FALLS)


def _lowered(state: State, loss: float | None) -> State:
    """Lower the noise after the third consecutive decrease of the public loss, and after each further one."""
    if loss is None:
        return state
    falls = int(state.get("falls", 0)) + 1 if loss < state.get("loss", -math.inf) else 0
    lowered = int(state.get("lowered", 0)) + (falls >= FALLS)
    return {**state, "loss": loss, "falls": falls, "lowered": lowered}


def no_cheaper(step: DpSgd, priced: DpSgd, s: Setting) -> DpSgd:
    """Return `step` with enough noise to cost no more than `priced`, since the share of the grid depends on the clip."""

    def multiplier(of: DpSgd) -> float:
        return of.noise_multiplier * of.clip / step_sensitivity(of, s.layout.dimension, s.scope.adjacency)

    wanted = multiplier(priced)
    while 0 < multiplier(step) < wanted:
        step = replace(step, noise_multiplier=step.noise_multiplier * (wanted / multiplier(step)) * (1 + 1e-12))
    return step
