"""The caveats of a privacy statement: assumptions, sampling, selection, evaluation, and warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedveil.accounting.accountant import bound
from fedveil.accounting.secret_samples import is_amplified
from fedveil.accounting.types import (
    Adjacency,
    Event,
    FixedSampleGaussian,
    Gaussian,
    Guarantee,
    SampledGaussian,
    SeenCountGaussian,
    Unit,
    UserRecordsGaussian,
    View,
    at_most,
    epsilon,
    number,
    small,
)
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import lets_statistics_out, reason_of
from fedveil.methods.base import Fixed
from fedveil.methods.method import participation_of, weighting_of
from fedveil.methods.projected import assumptions_of
from fedveil.methods.run_cost import charged_bound, events_in_view, run_variation, sampler_adds, sampler_line
from fedveil.statement.scope_checks import is_vacuous, neighbouring_pair
from fedveil.statement.statement import SIMULATION_ONLY, Assumption, NoiseShares
from fedveil.tasks.classification import SCORE_EDGES, counts_scores

if TYPE_CHECKING:
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting
    from fedveil.tasks.task import Task


_MATTERS = 1.01
"""Epsilons are quoted side by side where they differ by this factor."""

_RECORDS = (2, 10)


def seen_count_epsilon(s: Setting, events: Sequence[Event], epsilon: float, *, memoryless: bool) -> float | None:
    """Return epsilon if the number of participants of each round is observed, or None if it is at most 1 % above `epsilon`.

    Args:
        events: of the run. epsilon: proven of them with a hidden number.
        memoryless: clients keep nothing of one round for the next. Else what they send later may tell who took part, and then
            nothing is left of the crowd: the only one whose number is seen is the client itself.

    Source: docs/privacy-theorems.md, "The number of participants is seen".
    """
    if s.example_clip is not None:
        return None
    honest = max(s.clients - s.colluders, 1) if memoryless else 1
    seen: list[Event] = [
        SeenCountGaussian(honest, e.rate, e.noise_multiplier, e.count) if isinstance(e, SampledGaussian) else e for e in events
    ]
    if not any(map(is_amplified, seen)):
        return None
    found, _ = bound(seen, s.delta, adjacency=neighbouring_pair(s.scope, per_example=False))
    return found if found > _MATTERS * epsilon else None


def _sampling_notes(method: Method, s: Setting, events: Sequence[Event], *, memoryless: bool) -> tuple[str, ...]:
    """Return remarks on the run's own view, whose releases are `events`; they do not change what is proven.

    Args:
        memoryless: clients keep nothing of one round for the next, which each sample's being drawn afresh rests on.
    """
    secret = _secret_sample(method, s, events) if memoryless else ""
    return tuple(filter(None, (secret, _several_records(s, events))))


def _secret_sample(method: Method, s: Setting, events: Sequence[Event]) -> str:
    """Return, as a sentence, the epsilon that a fixed-size sample would give if it were secret.

    The sentence is empty unless every round costs the same Gaussian release.
    """
    afresh = s.max_participations is None and s.min_survivors is None and participation_of(method, s) is None
    summed = s.scope.view is not View.SERVER and s.example_clip is None and isinstance(method.release(s), Fixed)
    if not (afresh and summed and s.colluders == 0 and s.sampling == "fixed" and s.cohort < s.clients):
        return ""
    if not all(isinstance(event, Gaussian) and event.mu > 0 for event in events):
        return ""
    rounds = [event for event in events if isinstance(event, Gaussian)]
    if sum(event.count for event in rounds) != s.rounds:
        return ""
    sampled = [FixedSampleGaussian(s.clients, s.cohort, 1 / event.mu, event.count) for event in rounds]
    pair = neighbouring_pair(s.scope, per_example=False)
    full, secret = (bound(e, s.delta, adjacency=pair)[0] for e in (rounds, sampled))
    if secret * _MATTERS > full:
        return ""
    return (
        f"{s.cohort} of {s.clients} clients are drawn afresh in each round: against whoever sees the sums and never learns who "
        f"was drawn, epsilon = {at_most(secret)}; the proven number does not count on that secrecy"
    )


def _several_records(s: Setting, events: Sequence[Event]) -> str:
    """Return the guarantee of DP-SGD for a user with several records of one client, as a sentence."""
    if s.example_clip is None or s.scope.unit is not Unit.RECORD or s.scope.adjacency is not Adjacency.ZERO_OUT:
        return ""
    sampled = [event for event in events if isinstance(event, SampledGaussian)]
    if not sampled or len(sampled) < len(events):
        return ""
    found = []
    for k in (k for k in _RECORDS if k <= s.records):
        costs = [UserRecordsGaussian(k, event.rate, event.noise_multiplier, event.count) for event in sampled]
        found.append(f"{at_most(bound(costs, s.delta, adjacency=s.scope.adjacency)[0])} with {k} records")
    if not found:
        return ""
    return (
        f"a user with several records at one client is protected less: epsilon = {', '.join(found)} (at delta = {small(s.delta)})"
    )


def _selection_note(method: Method, s: Setting, proven: float, events: Sequence[Event]) -> list[str]:
    """Describe how the run was chosen, with the epsilon of one run and of all runs; `events` are the releases of one run."""
    if s.selection is None:
        return []
    alone, _ = charged_bound(events, s.delta, run_variation(method, replace(s, selection=None)), s.scope.adjacency)
    beside = f"one such run alone costs epsilon = {epsilon(alone)}, the whole search {epsilon(proven)}, which is proven"
    if s.selection.law is None:
        found = [f"{s.selection.runs:g} runs were looked at, and this is one of them: {beside}"]
    else:
        shape = "logarithmic law" if s.selection.shape == 0 else f"negative binomial law of shape {s.selection.shape:g}"
        found = [
            f"chosen by private selection among a random number of runs, expected {s.selection.runs:g} ({shape}): {beside}; "
            f"the number and the other runs stay secret"
        ]
    if (noise := s.selection.score_noise) is None:
        return [
            *found,
            "it was chosen by its score on the test set, so that this score says too much, and is no part of the cost",
        ]
    deviation = noise / (2 * s.clients)
    return [
        *found,
        f"it was chosen by the mean score of the clients on examples of their own, with noise of standard deviation "
        f"{number(deviation)}, charged with each run",
    ]


def _selection_assumptions(s: Setting) -> list[Assumption]:
    """Return the assumptions behind the bound of a search."""
    if s.selection is None:
        return []
    if s.selection.law is None:
        return [
            Assumption(
                f"no more than these {s.selection.runs:g} runs were looked at",
                "each further run on the same data, of this search or before it, adds its own cost",
            )
        ]
    found = [
        Assumption(
            "the number of runs stays secret, and nobody but the machine that made them saw a round, a score or a file of any "
            "run before the best was handed over",
            "whoever counts the runs, or sees those that lost, has seen releases that the bound of the best one does not cover",
        ),
        Assumption(
            "how long the search took, and how much power it drew, is not observed",
            "it grows with the number of runs; nothing that is written keeps it",
        ),
        Assumption(
            "each run drew its settings afresh, from choices that were fixed before the data were seen",
            "settings chosen after a look at an earlier run's result make the runs depend on each other",
        ),
    ]
    if s.selection.score_noise is None:
        found.append(
            Assumption(
                "the test set, by which the run was chosen, is public",
                "a score on private data is a release of its own, and nobody charged it",
            )
        )
    return found


def check_evaluation(method: Method, s: Setting, proven: Guarantee) -> None:
    """Refuse counts beside releases that have no noise of their own to share with them.

    Args:
        proven: in the run's own view.

    Raises:
        ConfigError: with what to choose instead.
    """
    if s.evaluation is None:
        return
    main = s.task.main
    if s.example_clip is not None and main.name != "accuracy" and not counts_scores(s.task):
        raise ConfigError(
            f"privacy.evaluation with training.local = 'dp-sgd' counts the answer to each record alone, and the main metric of "
            f"task.name = {s.task.name!r} is {main.phrase}: leave it out, or choose a task whose main metric is the accuracy or "
            f"the area under the ROC curve"
        )
    if not main.share or main.sign < 0:
        raise ConfigError(
            f"privacy.evaluation counts right answers, and the main metric of task.name = {s.task.name!r} is {main.phrase}: "
            f"leave it out, or choose a task whose main metric is a share, such as accuracy"
        )
    if s.scope.view is View.FINAL:
        raise ConfigError(
            "privacy.evaluation with privacy.view = 'final': the counts of each round are seen, and that view speaks of the last "
            "model alone: set privacy.view = 'aggregate' or 'server'"
        )
    if math.isinf(proven.epsilon):
        raise ConfigError(
            f"privacy.evaluation: nothing is proven of this run ({proven.reason or 'epsilon is infinite'}), so the counts "
            "would not be protected: leave it out, or set privacy.epsilon and a variant that is proven"
        )
    release = method.release(s)
    if isinstance(release, Fixed) and release.always.mechanism.stateful:
        raise ConfigError(
            f"privacy.evaluation: the noise of {method.name} is correlated over the rounds, and counts of a round need noise of "
            f"their own: leave it out, or choose another method"
        )


def _evaluation_note(s: Setting) -> list[str]:
    """Describe the counts released with each update, and their price."""
    if s.evaluation is None:
        return []
    counted = "how many of a client's own test examples the global model gets right and how many wrong"
    if counts_scores(s.task):
        counted = f"how many of a client's own test examples have a score in each of {len(SCORE_EDGES) + 1} public bins, by class"
    if s.example_clip is not None:
        return [
            f"each release holds {counted}, of at most {s.evaluation.examples}: a test record joins these counts as a training "
            f"record joins the batches, with the same noise, so they add nothing to epsilon and take nothing from the update "
            f"(privacy.evaluation.share has no effect here)"
        ]
    return [
        f"each release holds {counted}, of at most {s.evaluation.examples}: these counts are "
        f"{number(100 * s.evaluation.share)} % of its mu^2, and the noise of the update is {number(s.update_noise)} times as "
        f"large for it"
    ]


_SHOWN = 8
"""Number of list entries that are written out."""


def units(s: Setting) -> int:
    """Return the number of units of privacy: clients, or records of all clients."""
    return s.clients if s.scope.unit is Unit.CLIENT else s.clients * s.known_records


def assumptions(method: Method, s: Setting, view: View, events: list[Event]) -> tuple[Assumption, ...]:
    """Return the assumptions behind the proven bound of one view; empty if nothing is proven."""
    found = [
        Assumption(
            "noise comes from a secret cryptographic source, and each draw is used once",
            "whoever can predict or repeat noise can subtract it",
        ),
        _clipping(s),
    ]
    if s.scope.adjacency is Adjacency.ZERO_OUT and s.example_clip is not None:
        found.append(
            Assumption(
                "which records train, test or are public, and at which client, stays the same when one's contribution is zeroed",
                "splits such as data.client_test_fraction go by the number and the places of records: one that is left out "
                "before them moves others between training and test, and the bound counts one record",
            )
        )
    if s.scope.adjacency is Adjacency.ZERO_OUT and s.scope.unit is Unit.CLIENT:
        found.append(
            Assumption(
                "the number of participants and the denominator of the mean stay the same when one contribution is zeroed",
                "zero-out compares a contribution with zero; that somebody took part at all is not hidden by it",
            )
        )
    if view is not View.SERVER and s.example_clip is None:
        found += _summing(method, s)
    if s.example_clip is not None:
        found.append(
            Assumption(
                "the computed gradient of a record does not depend on where in its batch it is, and nobody chose the weights of "
                "a model so that it does",
                "records are computed so many at a time, a public number, and the others among these changed no bit where it "
                "was measured; functions such as tanh rounded otherwise at the end of a vector, which moved gradients by up to "
                "1e-7 of their norm; the bound does not count it",
            )
        )
    if s.scope.unit is Unit.RECORD and s.divided_by:
        found.append(
            Assumption(
                "which client holds which record is fixed and public, and stays as it is when a record changes",
                f"{s.divided_by} goes, or may go, by the classes of records: where one has another class, others may lie with "
                f"other clients or in the other half of the split, and the bound counts the change of one record",
            )
        )
    found += dict.fromkeys(_sampling(s, event) for event in events if is_amplified(event))
    if s.max_participations is not None:
        found.append(
            Assumption(
                f"no client takes part in more than {s.max_participations} rounds",
                "the bound counts that many releases of one client",
            )
        )
    found += [*_task(s.task), *_selection_assumptions(s)]
    return (*found, *(Assumption(text, f"the bound of {method.name} rests on it") for text in assumptions_of(method, s)))


def _task(task: Task) -> list[Assumption]:
    """Return the assumption about a loss that is user-defined or has constants; empty for other built-in losses."""
    found = []
    if task.constants:
        values = ", ".join(f"task.{key} = {_short(value)}" for key, value in task.constants.items())
        found.append(
            Assumption(
                f"the constants of the loss are public, not computed from the private data: {values}",
                "what is computed from private data without noise is a release of its own, which nobody charged",
            )
        )
    if task.is_user_defined:
        found.append(
            Assumption(
                f"loss and scores of task.name = {task.name!r}, which are code of the user's own, depend on nothing but what "
                f"they are called with, and public constants",
                "what they read of the private data elsewhere would pass by the clip, or stand in a public score",
            )
        )
    return found


def _short(value: object) -> str:
    """Format a number, or the first few of a list."""
    if not isinstance(value, tuple | list):
        return f"{value}"
    more = f", ... ({len(value)} numbers)" if len(value) > _SHOWN else ""
    return f"[{', '.join(map(str, value[:_SHOWN]))}{more}]"


def _clipping(s: Setting) -> Assumption:
    if s.example_clip is not None:
        return Assumption(
            f"each record's gradient is clipped to {s.example_clip:g}, and the {s.records} records a client are a public number",
            "sampling rate, number of steps and denominator are computed from public numbers alone",
        )
    if s.clipped_at == "server":
        return Assumption(
            "the server clips each contribution as configured, before it adds them up",
            "the sensitivity is the clip norm; contributions reach the server as they are, without clip or noise",
        )
    return Assumption(
        "each client's software clips its contribution as configured",
        "the sensitivity is the clip norm; an attacker's own client may break it, and loses only its own protection",
    )


def _summing(method: Method, s: Setting) -> list[Assumption]:
    if s.noise_place == "shares":
        return _shared_noise(s)
    if s.scope.view is not View.SERVER:
        return [
            Assumption(
                "secure aggregation or a trusted server shows nothing of a round but the noisy sum",
                "a single upload has less noise of its own than the sum has, or none",
            )
        ]
    if not s.can_share or events_in_view(method, s, View.AGGREGATE) == events_in_view(method, s, View.SERVER):
        return []  # what is proven against the server holds for all, whoever is missing
    least = f"at least {s.min_survivors}" if s.min_survivors is not None else f"all {s.cohort}"
    others = f", at most {s.colluders} of them the adversary's" if s.colluders else ", of which a client knows its own noise"
    return [
        Assumption(
            f"no upload is missing: the sum of each round holds {least} noisy uploads{others}",
            "each upload brings a share of the noise; setting privacy.min_survivors skips rounds with fewer",
        )
    ]


def _shared_noise(s: Setting) -> list[Assumption]:
    """Return the assumptions about noise in shares, with or without masks."""
    c = s.known_shares
    why = "the shares of the others are as much noise as the promise needs; against more of them it is worth less, as a note says"
    if s.secure_aggregation == "none":
        hidden = Assumption(
            "secure aggregation or a trusted server shows nothing of a round but the noisy sum",
            "a single upload has a share of the noise only",
        )
        return [hidden, Assumption(f"at most {c} of the clients of a round work together", why)]
    found = [
        Assumption(f"at most {c} of the keys on the roster belong to the server or to clients that work with it", why),
        Assumption(
            "X25519, HKDF-SHA256, AES-256 in counter mode and Ed25519 are secure: against the server, the promise is "
            "computational",
            "who breaks them, now or from recorded messages later, sees single vectors, each with a share of the noise",
        ),
    ]
    if s.secure_aggregation == "simulate":
        found.append(
            Assumption(
                "nobody looks into the process that plays server and clients",
                "a simulation hides nothing from the machine that draws its masks: against a server, only a deployment holds",
            )
        )
    return found


def _sampling(s: Setting, event: Event) -> Assumption:
    """Return the assumptions of amplification by sampling."""
    if s.example_clip is not None:
        return Assumption(
            "each record joins each local batch independently, and who joined never leaves the client",
            "amplification by sampling fails for shuffled batches and for those who see the batches",
        )
    if isinstance(event, FixedSampleGaussian):
        return Assumption(
            f"{s.cohort} of {s.clients} clients are drawn afresh for each round, and who was drawn stays secret; clients keep "
            f"nothing of one round for the next",
            "amplification by sampling fails for those who see the sample, or what tells of it later",
        )
    seen = isinstance(event, SeenCountGaussian)
    hidden, kept = (
        ("who joined", "; clients keep nothing of one round for the next") if seen else ("who joined, and how many did,", "")
    )
    return Assumption(
        f"each client joins each round independently with probability {s.rate:g}, and {hidden} stays hidden from everybody but "
        f"the server or the secure aggregation that adds the uploads up{kept}",
        "amplification by sampling fails for those who see the sample, and is worth less to those who see its size",
    )


def not_protected(method: Method, s: Setting, proven: Guarantee, *, batch_norm: bool | None) -> tuple[str, ...]:
    """Return what the guarantee does not cover."""
    lines = [
        "participation: who takes part in which round, and how many do, is seen by the server or whoever adds the uploads up",
        "absence, refusals and running time: a client whose process vanishes is missing from its round, on one machine a "
        "single value that is not as configured refuses the whole run, and it is seen how long each client takes",
    ]
    if s.amplified and s.example_clip is None:
        lines.append(
            "the number of participants: the ledger and the folder private of a run write it down, so publish what "
            "`fedveil publish` copies, which leaves it out"
        )
    if s.secure_aggregation != "none":
        lines.append(
            "what single clients send: nobody can check the clip of a masked vector, and a client may move a sum by as much as "
            "honest clients together could, or spoil it, without being named"
        )
    weights = ", and each client's own, by which it weighs" if weighting_of(method) == "examples" else ""
    lines.append(f"sizes: the number of clients and the nominal number of examples a client{weights}")
    if batch_norm is not False:
        lines.append(_batch_norm(method, s, proven, known=bool(batch_norm)))
    lines.append(
        f"{'the test set' if s.evaluation is None else 'the public test set, if the run has one'}: figures on it are published "
        f"without noise, so they protect nobody who is in it, even if the rest of their data is trained on"
    )
    other = "runs" if s.selection is None else "runs outside this search"
    lines.append(
        f"hyper-parameter tuning: {other} made to choose clip, rates or rounds on the same data cost privacy of their own"
    )
    lines.append(
        "figures of a simulation: training loss, per-client accuracy and failures are computed from private data without noise; "
        "they lie in the run's folder private: publish none of them"
    )
    if s.scope.unit is Unit.RECORD:
        lines.append("a client as a whole: many records of one client together are protected less, by group privacy")
    if proven.epsilon < math.inf:
        lines.append("what holds for the population: a model may reveal it about people who never took part")
    return tuple(lines)


def _batch_norm(method: Method, s: Setting, proven: Guarantee, *, known: bool) -> str:
    if not _statistics_stay(method, s, proven):
        stay = "they leave the client as they are"
    elif s.public_split:
        stay = "they stay on the client; those of the model that is handed over are estimated on the public examples"
    else:
        stay = "they stay on the client and are no part of the released model"
    return f"batch-norm statistics{'' if known else ', if the network has any'}: no clip or noise is applied to them; {stay}"


def _statistics_stay(method: Method, s: Setting, proven: Guarantee) -> bool:
    """Return whether clients keep their batch statistics; for plans that vary by round, whether epsilon is finite."""
    release = method.release(s)
    if isinstance(release, Fixed):
        return not lets_statistics_out(release.always, reason_of(release.always))
    return proven.epsilon < math.inf


def warnings(
    method: Method, s: Setting, proven: Guarantee, *, seeded_noise: bool, batch_norm: bool | None = None
) -> tuple[str, ...]:
    """Return the warnings that a reader must see first."""
    found = [SIMULATION_ONLY] if seeded_noise else []
    if batch_norm and not s.public_split and _statistics_stay(method, s, proven):
        found.append(
            "batch statistics: the network normalises by statistics of its batches, which stay on the clients, so the model that "
            "is handed over, and every score, has those that it began with, and may be of no use: set data.public_fraction, such "
            "as 0.1, which estimates them on public examples, or take a network with group normalisation (norm = 'group', "
            "nn.GroupNorm)"
        )
    if (larger := s.noise_cohort) is not None:
        found.append(
            f"extrapolation: the noise is that of a federation of {larger.clients:,} clients, {larger.clients_per_round:,} "
            f"per round, in which epsilon would be {number(larger.epsilon)}; for these {s.clients:,} clients, {s.cohort:,} per "
            f"round, epsilon = {epsilon(proven.epsilon)} is what is proven"
        )
    if is_vacuous(s.delta, units(s)):
        found.append(
            f"delta = {small(s.delta)} is not below 1 / {units(s)} (the number of {s.scope.unit}s): publishing one "
            f"{s.scope.unit} at random would satisfy it"
        )
    if math.isinf(proven.epsilon) and (s.epsilon is not None or s.noise_multiplier):
        found.append(f"noise is added, but nothing is proven at delta = {small(s.delta)} ({proven.scope}): {proven.reason}")
    return tuple(found)


def notes(method: Method, s: Setting, proven: Guarantee, events: list[Event], *, memoryless: bool) -> tuple[str, ...]:
    """Return notes on the numbers of the run's own view; `events` are its releases. memoryless: as in `_sampling_notes`."""
    if math.isinf(proven.epsilon):
        return ()
    found = _selection_note(method, s, proven.epsilon, events)
    found += [
        *_evaluation_note(s),
        *_averaged(s),
        *_sampling_notes(method, s, events, memoryless=memoryless),
        sampler_line(run_variation(method, s), proven.epsilon, s.delta),
    ]
    if s.scope.unit is Unit.RECORD and s.example_clip is None:
        found.insert(
            0,
            "the mechanism clips whole clients, so the bound for one record holds for all records of its client together: "
            "replacing one record is one way of replacing the client's data",
        )
    return tuple(filter(None, found))


def shares_notes(shares: NoiseShares | None) -> list[str]:
    """Describe noise in shares, and what the promise is worth if more clients work together; empty if noise is added once."""
    if shares is None or math.isinf(shares.others):
        return []
    c, told = shares.colluders, "work with the server" if shares.masks != "none" else "work together"
    return [
        f"each client adds a share of the noise, made for the set that it is in, of at least {shares.least} clients; an attempt "
        f"at a sum that fails is a release, too, and {shares.spare} are priced beside the rounds",
        f"epsilon holds if at most {c} of the clients {told}: if {2 * c} do, epsilon = {epsilon(shares.twice)}, and if all but "
        f"one do, epsilon = {epsilon(shares.others)} for that one",
    ]


def _averaged(s: Setting) -> list[str]:
    """Describe the released model, if it is not the last one."""
    if s.final_model == "last":
        return []
    of = {"tail": f"mean of the models of the last {s.tail_rounds} rounds", "ema": "exponential moving average of the models"}
    return [f"the model that is handed over is the {of[s.final_model]}: post-processing of what was released, at no cost"]


def ideal_noise(variation: float, epsilon: float, delta: float) -> list[Assumption]:
    """Return the assumption that a large epsilon needs, since the sampler's distance is multiplied by e^epsilon."""
    if sampler_adds(variation, epsilon, delta) is not None:
        return []
    return [
        Assumption(
            f"the noise sampler is ideal, not only within total variation {variation:.2g} over the whole run",
            f"at epsilon = {at_most(epsilon)} that distance would add more than 1 % to delta = {small(delta)}",
        )
    ]
