"""A model card: Markdown under a YAML header, as model hubs show it, with the privacy statement as its main part."""

from __future__ import annotations

from collections.abc import Iterator

from fedveil.statement import institution_facts as shared
from fedveil.statement.public_figures import RunFigures
from fedveil.statement.statement import Statement
from fedveil.statement.statement_text import TextSection

TITLE = "Model card"
_AUTHORS = (
    "Only the authors can say: licence, intended and excluded uses, languages, origin of the data, who trained the model, and "
    "how it does on groups of people."
)


def header(s: Statement) -> str:
    """The YAML header; every value is a plain word."""
    tags = sorted({"federated-learning", s.method, *([] if shared.why_not_alone(s) else ["differential-privacy"])})
    return "\n".join(["---", "library_name: fedveil", "tags:", *(f"- {shared.one_line(tag)}" for tag in tags), "---"])


def model_card(s: Statement, run: RunFigures | None) -> Iterator[TextSection]:
    """The sections of the card."""
    training = [*shared.asked(s, "run", "noise multiplier"), *(run.training() if run else ())]
    yield TextSection("Training", items=tuple(training))
    if run is not None:
        nothing = () if run.metrics else ("No evaluation is recorded.",)
        yield TextSection("Evaluation", nothing, items=tuple(run.evaluation()))
    privacy = [*shared.asked(s, "promise", "target", "accountant"), *shared.unit(s), *shared.numbers(s), *shared.audits(s)]
    yield TextSection("Privacy", items=(*privacy, *shared.notes(s)))
    if s.assumptions:
        yield TextSection("What the proof rests on", items=tuple(shared.assumptions(s)))
    yield TextSection("Limits: what is not protected", items=tuple(shared.unprotected(s)))
    if run is not None:
        yield TextSection("How to check it", items=tuple(run.checking()))
    yield TextSection("To be added", (_AUTHORS,))
