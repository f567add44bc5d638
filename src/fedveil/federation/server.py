"""The server's step, and the record of a round: noise, clip, coordinates, bytes, a method's own figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedveil.accounting.types import View
from fedveil.errors import ConfigError
from fedveil.federation.history import reads_private_data, reserved
from fedveil.federation.private_code import found_by
from fedveil.mechanism.cost import per_layer, promises
from fedveil.mechanism.plan import COUNTS, LocalDpSgd, step_of
from fedveil.methods.method import CoverageMean, Summed, SumServer, UploadServer, weighting_of
from fedveil.release.dpsgd import step_noise
from fedveil.release.sealed import AGGREGATE
from fedveil.training.local import HasMetrics

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.federation.history import Columns, Row
    from fedveil.federation.progress import Federation, Progress
    from fedveil.federation.round import Context, Outcome
    from fedveil.mechanism.plan import Plan, Upload
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting
    from fedveil.training.local import State
    from fedveil.training.params import Layout


def server_step(method: Method, s: Setting, state: State, uploads: Sequence[Upload], model: Tensor) -> tuple[State, Tensor]:
    """Return the server's next state and its step [d] of the global model.

    If the server's rate is relative to the clip, the step is divided by the round's largest clip.

    Raises:
        ConfigError: the server is of an unknown type, or its step has a wrong type or shape.
    """
    server = method.server(s)
    if isinstance(server, SumServer):
        state, step = server.step(s, state, Summed.of(uploads, model))
    elif isinstance(server, UploadServer):
        state, step = server.step(s, state, [replace(upload, start=model) for upload in uploads])
    else:
        raise ConfigError(f"{method.name}: `server` returned {type(server).__name__}; allowed are SumServer and UploadServer")
    if not isinstance(step, torch.Tensor) or step.shape != model.shape or not step.is_floating_point():
        raise ConfigError(
            f"{method.name}: the step of its server is {_kind(step)}; "
            f"return one floating-point number per coordinate of the model, {len(model)} in all"
        )
    return state, step / max(whole_clip(upload.plan) for upload in uploads) if s.server.relative_to_clip else step


def whole_clip(plan: Plan) -> float:
    """Return the bound on a whole update: clip C, or the norm of the layers' clips if only these bound it."""
    return plan.clip if plan.layer_clip is None or math.isfinite(plan.clip) else float(plan.layer_clip.norm())


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


Figures = Mapping[str, float | list[float]]


_CLEAR = 3.0
"""Number of noise standard deviations below which a noisy number of examples is not reported."""


@dataclass(frozen=True)
class VisibleRound:
    """Releases of a round as one observer sees them; None or empty means not visible.

    Args:
        senders: number of clients with a release in the round. skipped: the reason why nothing was released.
        spent: number of clients whose budget is spent. uploads: with their plans. noise: its variance per upload and layer.
        sent: coordinates of each upload. mean: of the uploads, or all uploads if the server's step uses each of them.
        norm: of that step. noise_before: expected noise of earlier rounds, added up.
    """

    round: int
    senders: int | None
    skipped: str | None = None
    spent: int | None = None
    uploads: Sequence[Upload] = ()
    noise: Sequence[Tensor] | None = None
    sent: Sequence[int] = ()
    mean: Sequence[Upload] = ()
    norm: float | None = None
    noise_before: float | None = None

    def in_view(self, method: Method, s: Setting) -> VisibleRound:
        """Return what the run's view shows: no plan derived from private data, and no secret number of clients.

        If each client adds noise of its own, the noise is hidden, too, because it would reveal that number.
        """
        hidden: dict[str, Any] = {}
        noise = {"noise": None, "noise_before": None}
        if not shows_models(s):
            hidden |= {"spent": None, "uploads": (), "mean": (), "norm": None} | noise
        if reads_private_data(method):
            hidden |= {"uploads": (), "sent": ()} | noise
        if s.sampling == "poisson" and s.scope.view is not View.SERVER:
            brought = s.example_clip is not None or s.min_survivors is not None
            hidden |= {"senders": None, "skipped": None} | (noise if brought else {})
        return replace(self, **hidden) if hidden else self


def shows_models(s: Setting) -> bool:
    """Return whether the run's view shows intermediate models."""
    return s.scope.view is not View.FINAL


def public_figures(method: Method, s: Setting, columns: Columns, visible: VisibleRound, policies: Row) -> Row:
    """Return the public half of a round's record, without scores and spent epsilon.

    Args:
        seen: restricted to the run's view. policies: figures that the policy takes of its states, which derive from releases.
    """
    row = release_figures(method, s, visible)
    if shows_models(s):
        row |= {name: value for name, value in policies.items() if columns[name].public}
    return row | _noise_so_far(visible, row)


def private_figures(visible: VisibleRound, outcomes: Sequence[Outcome], released: Row, measured: Row) -> Row:
    """Return all figures of a round except scores and time.

    Args:
        seen: not restricted to the view. released: figures derived from it, unless all are public. measured: figures of the
            objective and the policy.
    """
    failed = {o.client: o.error for o in outcomes if o.error}
    row = {"participants": visible.senders, "failed": len(failed), "failures": failed, **released, **measured}
    row |= _noise_so_far(visible, row)
    if not any(o.remote for o in outcomes):  # the server does not know remote losses
        trained = [(o.loss, o.examples) for o in outcomes if not o.error]
        total = sum(n for _, n in trained)
        row["train_loss"] = sum(loss * n for loss, n in trained) / total if total else math.nan
    return row


def release_figures(method: Method, s: Setting, visible: VisibleRound) -> Row:
    """Return the figures that follow from a round's visible releases."""
    plans: Row = {}
    if visible.uploads:
        by_coverage = isinstance(method.server(s), CoverageMean)
        plans = {} if visible.noise is None else _noise(visible.noise, visible.uploads, s.layout, by_coverage=by_coverage)
        plans |= _clips(visible.uploads, s.layout)
        plans["coordinates"] = sum(visible.sent) / len(visible.sent)
    if visible.sent and visible.senders is not None:
        plans["uplink_bytes"] = 4 * sum(visible.sent) * (1 if s.scope.view is View.SERVER else visible.senders)
    row = {"round": visible.round, "participants": visible.senders, "spent_clients": visible.spent, "skipped": visible.skipped}
    row |= plans | {"update_norm": visible.norm} | evaluation_figures(s, visible.mean, visible.senders)
    return {name: value for name, value in row.items() if value is not None}


def _noise_so_far(visible: VisibleRound, row: Row) -> Row:
    """Return the expected noise of all rounds added up, if each is known; `row` holds this round's."""
    if visible.noise_before is None or (visible.uploads and "noise_norm" not in row):
        return {}
    return {"cumulative_noise_norm": visible.noise_before + row.get("noise_norm", 0.0)}


def coordinates(upload: Upload, layout: Layout) -> int:
    """Return how many coordinates each client of an upload sent."""
    return layout.dimension if upload.support is None else int(upload.support.sum())


def _clips(uploads: Sequence[Upload], layout: Layout) -> Row:
    """Return the updates' clip; under DP-SGD, which clips example gradients instead, their clip and the expected batch."""
    steps = [u.plan.step for u in uploads if isinstance(u.plan, LocalDpSgd)]
    if len(steps) == len(uploads):
        return {
            "example_clip": sum(step.clip for step in steps) / len(steps),
            "expected_batch": sum(step.expected for step in steps) / len(steps),
        }
    bounds = (u.plan.clip if u.plan.layer_clip is None else u.plan.layer_clip for u in uploads)
    clips = torch.tensor([per_layer(bound, layout) for bound in bounds])
    return {"clip": sum(whole_clip(u.plan) for u in uploads) / len(uploads), "layer_clip": clips.mean(0).tolist()}


def noise_variances(
    method: Method,
    s: Setting,
    uploads: Sequence[Upload],
    weights: Mapping[int, float],
    drawn: Mapping[int, Tensor] | None = None,
    *,
    remote: bool = False,
) -> list[Tensor]:
    """Return the mean variance of each upload's noise per layer [L]: the door's, and that drawn in training.

    Args:
        weights: of each client in the uploads. drawn: power of training noise that plans do not determine.
        remote: whether clients run elsewhere, so that their training noise may be unknown.
    """
    layout = s.layout
    denominator = s.cohort if weighting_of(method) == "uniform" else sum(weights.values())
    powers = _training_noise(s, uploads, weights, remote=remote) | dict(drawn or {})
    result = []
    for u in uploads:
        variance = u.noise_std.square()
        if u.client in powers:
            variance = variance + powers[u.client] / torch.tensor(_counts(u, layout)).clamp_min(1.0)
        elif u.client < 0 and powers:
            shares = torch.zeros(len(layout))
            for c, own in powers.items():
                shares = shares + own * (weights[c] / denominator) ** 2
            variance = variance + shares / torch.tensor(_counts(u, layout)).clamp_min(1.0)
        result.append(variance)
    return result


def _training_noise(s: Setting, uploads: Sequence[Upload], clients: Iterable[int], *, remote: bool) -> dict[int, Tensor]:
    """Return the power per layer [L] of each client's training noise, as far as its plan determines it.

    NaN for a remote client under a plan that promises nothing: its noise is unknown.
    """
    plans, powers = {u.client: u.plan for u in uploads}, {}
    for client in clients:
        plan = plans.get(client) or plans[AGGREGATE]
        if isinstance(plan, LocalDpSgd):
            powers[client] = step_noise(plan.step, s.local, s.layout, uploads[0].round)
        elif remote and not promises(plan, s.layout):
            powers[client] = torch.full((len(s.layout),), torch.nan)
    return powers


def _noise(variances: Sequence[Tensor], uploads: Sequence[Upload], layout: Layout, *, by_coverage: bool) -> Row:
    """Return the global step's noise: expected norm, and root mean square per layer over the coordinates that were sent.

    Empty if any training noise is unknown (NaN).
    """
    total = sum(u.weight for u in uploads)
    if by_coverage and any(u.support is not None for u in uploads):
        variance, weight = torch.zeros(layout.dimension), torch.zeros(layout.dimension)
        for u, v in zip(uploads, variances, strict=True):
            sent = torch.ones(layout.dimension) if u.support is None else u.support.float()
            variance.add_(layout.expand(v * u.weight**2) * sent)
            weight.add_(sent, alpha=u.weight)
        variance /= weight.square().where(weight > 0, torch.ones_like(weight))
        noise_power = torch.stack([part.sum() for part in layout.split(variance)])
        reached = torch.stack([(part > 0).sum() for part in layout.split(weight)]).float()
    else:
        counts, each = torch.tensor([_counts(u, layout) for u in uploads]), torch.stack([*variances])
        shares = torch.tensor([[(u.weight / total) ** 2] for u in uploads], dtype=each.dtype)
        summands = (each * shares * counts).numpy()
        noise_power = torch.from_numpy(np.add.accumulate(summands)[-1])  # in order, one upload at a time
        reached = counts.amax(0)
    if noise_power.isnan().any():
        return {}
    return {
        "noise_norm": float(noise_power.sum().sqrt()),
        "layer_noise_std": (noise_power / reached.clamp_min(1.0)).sqrt().tolist(),
    }


def evaluation_figures(s: Setting, uploads: Sequence[Upload], senders: int | None) -> Row:
    """Return what a round's counts say about the model at its start; post-processing of releases.

    Under DP-SGD each test record is counted as often as it joined a step, which is random, too.

    Args:
        uploads: of the round, or one mean of them. senders: number of uploads, if they are not summed.

    Returns:
        `noisy_METRIC`, the standard deviation of its noise, and `noisy_examples`; empty if noise dominates.
    """
    if s.evaluation is None or not uploads:
        return {}
    summed = uploads[0].client < 0
    divided_by = s.cohort if senders is None or s.scope.view is not View.SERVER else senders
    expected = [_times_counted(u.plan) for u in uploads]
    counts = torch.stack([u.extras[COUNTS].double() / times for u, times in zip(uploads, expected, strict=True)]).sum(0)
    shares = divided_by if summed and uploads[0].plan.place == "upload" else 1  # noise in shares, one per planned client
    variance = sum(_counts_variance(u.plan) / times**2 for u, times in zip(uploads, expected, strict=True))
    noise = math.sqrt(shares * variance)
    counts = counts * (divided_by if summed else 1)
    groups = counts if counts.dim() == 2 else counts[None]  # both classes have to stand out of the noise
    if not bool((groups.sum(1) >= _CLEAR * math.sqrt(groups.shape[1]) * noise).all()):
        return {}
    metric, steps = f"noisy_{s.task.main.name}", [step for step in map(step_of, (u.plan for u in uploads)) if step is not None]
    sampled = max(((1 - step.rate) / (step.rate * step.steps) for step in steps), default=0.0)
    value, variance_of = _auc(counts) if counts.dim() == 2 else _share(counts)
    deviation = math.sqrt(variance_of(noise**2 + sampled * counts.clamp_min(0)))
    return {metric: min(max(value, 0.0), 1.0), f"{metric}_std": deviation, "noisy_examples": float(counts.sum())}


Variance = Callable[["Tensor"], float]
"""Function from the variance of each count to that of a figure."""


def _counts_variance(plan: Plan) -> float:
    """Return the variance of a client's noise on each count; under DP-SGD that of all steps."""
    step = step_of(plan)
    return plan.extras[COUNTS].noise_std ** 2 * (1 if step is None else step.steps)


def _times_counted(plan: Plan) -> float:
    """Return how often a test record is expected to be counted in a round."""
    step = step_of(plan)
    return 1.0 if step is None else step.rate * step.steps


def _share(counts: Tensor) -> tuple[float, Variance]:
    """Return the share of right answers among (right, wrong)."""
    share, total = float(counts[0] / counts.sum()), counts.sum()
    slopes = torch.tensor([1 - share, -share], dtype=counts.dtype) / total
    return share, lambda variances: float((slopes**2 * variances).sum())


def _auc(counts: Tensor) -> tuple[float, Variance]:
    """Return the area under the ROC curve of scores in bins [2, bins], class 0 first; scores in one bin are tied.

    The variance is that of the bilinear form divided by the sizes of the classes, to first order in these, with the product of
    the noises of both classes.
    """
    negative, positive = counts
    order = torch.ones(len(negative), len(negative), dtype=counts.dtype).tril(-1)  # [bin of class 1, bin of class 0]
    order += 0.5 * torch.eye(len(negative), dtype=counts.dtype)
    area = float(positive @ order @ negative / (positive.sum() * negative.sum()))
    order = (order - area) / (positive.sum() * negative.sum())
    slopes, both = torch.stack([positive @ order, order @ negative]), order**2
    return area, lambda variances: float((slopes**2 * variances).sum() + variances[1] @ both @ variances[0])


def client_figures(
    federation: Federation, progress: Progress, clients: Sequence[int], columns: Columns, policies: Sequence[Figures]
) -> Row:
    """Return the means of the objective's figures (see `HasMetrics`) over the clients, and each client's figures.

    A figure is renamed if a column has its name. Figures that fail, or are neither a number nor one number per layer, are left
    out.

    Args:
        policies: figures of the policy, for each client or once for all.
    """
    context, objective, measured = federation.context, federation.context.objective, list[Figures]()
    if isinstance(objective, HasMetrics):
        allowed = reserved(federation.method, objective, columns), ((), (len(context.model.layout),))
        measured = [_measured(objective, progress.privates.get(c, {}), allowed, context) for c in clients]
    row = means(measured)
    own: dict[int, dict[str, Any]] = {c: {} for c in clients}
    for cells_of in (measured, () if context.summed else policies):
        for c, cells in zip(clients, cells_of, strict=False):
            own[c].update((key, value) for key, value in cells.items() if not isinstance(value, list))
    if any(own.values()):
        row["by_client"] = [{"client": c, **cells} for c, cells in own.items() if cells]
    return row


def _measured(
    objective: HasMetrics, state: State, allowed: tuple[Container[str], Container[tuple[int, ...]]], context: Context
) -> Figures:
    """Return what an objective measures of a client's state; empty if it fails, because how a run ends is public.

    Args:
        allowed: names already taken, and shapes that a figure may have.
    """
    taken, shapes = allowed

    def measured() -> dict[str, Any]:
        return {str(name): np.asarray(value, dtype=float).tolist() for name, value in objective.measures(state).items()}

    def apart(name: str) -> str:
        return apart(f"objective_{name}") if name in taken or name.startswith("test_") else name

    figures = found_by(measured, context) if state else None
    return {apart(name): value for name, value in (figures or {}).items() if np.shape(value) in shapes}


def means(rows: Sequence[Figures]) -> Row:
    """Return the mean of each figure over the rows that have it, for numbers and for lists of equal length."""
    by_name: dict[str, list[float | list[float]]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if len({np.shape(value) for value in values}) == 1:
            by_name[name] = values
    return {name: np.mean(values, axis=0).tolist() for name, values in by_name.items()}


def _counts(upload: Upload, layout: Layout) -> list[float]:
    """Return the coordinates sent of each layer [L]."""
    sent = layout.sizes if upload.support is None else [int(part.sum()) for part in layout.split(upload.support)]
    return [float(n) for n in sent]
