"""One privacy statement as the institutions ask for it: NIST, OpenDP's registry, an impact assessment, a model card."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from fedveil.statement import impact_facts, institution_facts, model_card, nist_answers
from fedveil.statement.public_figures import RunFigures
from fedveil.statement.registry_entry import registry_entry
from fedveil.statement.statement import Statement
from fedveil.statement.statement_markdown import markdown_section
from fedveil.statement.statement_text import TextSection

Institution = Literal["nist", "registry", "dpia", "model-card"]


def for_institution(statement: Statement, institution: Institution, run: RunFigures | None = None) -> str:
    """The statement as one institution asks for it, with the figures of a run if there are any; same input, same bytes."""
    if institution == "registry":
        return registry_entry(statement, run)
    if institution == "nist":
        return _page(nist_answers.TITLE, statement, nist_answers.nist_answers(statement, run))
    if institution == "dpia":
        return _page(impact_facts.TITLE, statement, impact_facts.impact_facts(statement, run))
    card = _page(model_card.TITLE, statement, model_card.model_card(statement, run))
    return f"{model_card.header(statement)}\n\n{card}"


def _page(title: str, statement: Statement, sections: Iterable[TextSection]) -> str:
    parts = [f"# {institution_facts.heading(title, statement)}"]
    parts += markdown_section(institution_facts.opening(statement), titled=False)
    for section in sections:
        parts += markdown_section(section)
    return "\n\n".join(parts) + "\n"
