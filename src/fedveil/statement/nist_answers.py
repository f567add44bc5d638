"""The questions of NIST SP 800-226 about a differential privacy guarantee, answered one by one from a statement.

The questions follow the publication's pyramid and its hazards in our own words (J. Near, D. Darais, N. Lefkovitz and G. Howarth,
Guidelines for Evaluating Differential Privacy Guarantees, 2025).
"""

from __future__ import annotations

from collections.abc import Iterator

from fedveil.statement import institution_facts as shared
from fedveil.statement.public_figures import RunFigures
from fedveil.statement.statement import Statement
from fedveil.statement.statement_text import Item, TextSection

TITLE = "Answers to the questions of NIST SP 800-226"
NOT_OURS = "Not ours: "


def nist_answers(s: Statement, run: RunFigures | None) -> Iterator[TextSection]:
    """One section a question."""
    limits, rests, notes = (shared.Remaining(f(s)) for f in (shared.unprotected, shared.assumptions, shared.notes))
    yield _answer("Privacy parameters: which epsilon and delta?", shared.numbers(s), shared.asked(s, "target"))
    several = [*notes.take("several records", "clips whole clients"), *limits.take("a client as a whole")]
    yield _answer("Unit of privacy: what is protected, and how do neighbouring data differ?", shared.unit(s), several)
    population = limits.take("what holds for the population")
    yield _answer("Promise: what may still be learned about people?", population, other="whether learning that harms a group.")
    yield _answer(
        "Threat model and trust: who is the adversary, and who must be trusted?", shared.adversaries(s), limits.take("sizes")
    )
    sampling = [*rests.take("joins each", "drawn afresh"), *notes.take("drawn afresh"), *limits.take("number of participants:")]
    yield _answer("Sampling: is the sample drawn, and kept secret, as the proof needs it?", shared.asked(s, "run"), sampling)
    mechanism = [*shared.asked(s, "noise multiplier"), *shared.audits(s), *(run.checking() if run else ())]
    yield _answer("Mechanism and implementation: is the algorithm right, and does the code do it?", mechanism)
    exact = [*shared.exactness(s), *rests.take("sampler is ideal"), *notes.take("noise sampler")]
    yield _answer("Floating point: does the released number format leak?", exact)
    composed = [*shared.asked(s, "accountant"), *shared.releases(s), *rests.take("takes part in more than")]
    others = "what other runs and other software release about the same people; `privacy.budget` adds up runs that share it."
    yield _answer("Composition over time: how do releases add up?", composed, other=others)
    yield _answer("Tuning: was privacy spent on choices before this run?", limits.take("hyper-parameter tuning"))
    yield _answer("Side channels: what is seen beside the releases?", limits.take("participation", "absence", "batch-norm"))
    access = "who may reach raw data, models and logs is decided where they lie."
    yield _answer(
        "Security and access control: who reaches the data?", limits.take("figures of a simulation", "test set"), other=access
    )
    collected = "which data are collected, how they get to a client and what else is kept there."
    yield _answer("Data collection exposure: what is at risk before any release?", other=collected)
    yield _answer("Utility: what does the noise cost?", shared.utility(s), run.evaluation() if run else [])
    bias = "noise and clipping can cost small groups more than large ones; measure the model on data of each group."
    yield _answer("Bias: who pays for the noise?", other=bias)
    yield _answer("Assumptions: what else does the proof rest on?", rests.take(), [*notes.take(), *limits.take()])


def _answer(question: str, *items: list[Item], other: str = "") -> TextSection:
    """What the statement says; what it leaves to others is marked so, and so is what has no answer where nothing is proven."""
    found = tuple(item for group in items for item in group)
    text = NOT_OURS + other if other else "" if found else "No answer: nothing is proven."
    return TextSection(question, (text,) if text else (), items=found)
