"""The facts that a data protection impact assessment asks of the method: GDPR Article 35(7), points (a) to (d)."""

from __future__ import annotations

from collections.abc import Iterator

from fedveil.statement import institution_facts as shared
from fedveil.statement.public_figures import RunFigures
from fedveil.statement.statement import Statement
from fedveil.statement.statement_text import TextSection

TITLE = "Facts for a data protection impact assessment"
_DISCLAIMER = (
    "This is no data protection impact assessment and no legal advice. It holds the facts about the method that an assessment "
    "under GDPR Article 35(7) asks for; each part ends with what remains for the controller to answer."
)
_REMAINS = "Remains the controller's: "


def impact_facts(s: Statement, run: RunFigures | None) -> Iterator[TextSection]:
    """One section for each point of Article 35(7)."""
    yield TextSection("What this is", (_DISCLAIMER,))
    processing = [*shared.asked(s, "run"), *(run.training() if run else ()), *shared.unit(s), *shared.adversaries(s)]
    yield TextSection(
        "(a) The processing",
        (
            _REMAINS + "purposes, legitimate interest, kinds of data and of people, origin of the data, recipients, time of "
            "storage, and who operates the server and the clients.",
        ),
        items=tuple(processing),
    )
    cost = [*shared.asked(s, "target"), *shared.releases(s), *shared.utility(s), *(run.evaluation() if run else ())]
    yield TextSection(
        "(b) Necessity and proportionality, as far as the method tells",
        (
            _REMAINS + "whether the purpose needs these data, whether less would do, the legal basis, and how people exercise "
            "their rights.",
        ),
        items=tuple(cost),
    )
    risks = [*shared.numbers(s), *shared.notes(s), *shared.audits(s), *shared.unprotected(s)]
    yield TextSection(
        "(c) Risks: what is proven, and what is not protected",
        (_REMAINS + "how likely and how severe these risks are for the people concerned, and all risks outside of training.",),
        items=tuple(risks),
    )
    measures = [*shared.asked(s, "noise multiplier", "accountant"), *shared.assumptions(s), *(run.checking() if run else ())]
    yield TextSection(
        "(d) Measures, and what must be ensured for the proof to hold",
        (
            _REMAINS + "security of data and machines, how each assumption is ensured, the advice of the data protection "
            "officer, the views of the people concerned, and whether the authority must be consulted.",
        ),
        items=tuple(measures),
    )
