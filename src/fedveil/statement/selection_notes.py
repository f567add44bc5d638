"""What a statement says of a run that was chosen among others: among how many, at what price, and what that rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedveil.accounting.formatting import epsilon, number
from fedveil.methods.sampler_error import charged_bound, run_variation
from fedveil.statement.statement import Assumption

if TYPE_CHECKING:
    from fedveil.accounting.types import Event
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting


def selection_note(method: Method, s: Setting, proven: float, events: Sequence[Event]) -> list[str]:
    """How the run was chosen, with the epsilon of one run alone beside that of all; `events` are the releases of one run."""
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


def selection_assumptions(s: Setting) -> list[Assumption]:
    """What the bound of a search rests on."""
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
