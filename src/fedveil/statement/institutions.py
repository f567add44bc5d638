"""One privacy statement as institutions ask for it: NIST, OpenDP's registry, an impact assessment, a model card.

A field is named as a path into the statement's JSON (`fedveil certify --json`, `statement.json` of a run); the sentences are
those of the statement.

The questions follow the publication's pyramid and its hazards in our own words (J. Near, D. Darais, N. Lefkovitz and G. Howarth,
Guidelines for Evaluating Differential Privacy Guarantees, 2025).

Field names and enumerations are those of schemas/deployments-schema.yaml in github.com/opendp/deployments-registry-data. What
only the curator knows is left out, never filled with a placeholder: the registry's own check refuses the entry until it is added.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fedveil.accounting.types import at_most, number
from fedveil.errors import ConfigError
from fedveil.statement.statement import SIMULATION_ONLY, VIEWS, Statement
from fedveil.statement.statement_layout import markdown_section
from fedveil.statement.statement_text import (
    Item,
    TextSection,
    facts,
    in_words,
    scope_line,
    sees,
    unit_in_words,
    variant_of,
    verdict_in_words,
)

_FIELDS = {
    "promise": ("views", "delta", "scope"),
    "target": ("target_epsilon", "delta", "scope"),
    "noise multiplier": ("noise_multiplier",),
    "accountant": ("accountant",),
    "run": ("cohort", "clients", "sampling", "rounds", "dimension"),
}
_INTEGERS = "what leaves with a guarantee is integers with integer noise, whose law is proven in docs/exact-release.md of fedveil"
_PUBLISHED = "published variant: the method as its paper prints it; what the paper claims is no proof"


def fact(text: str, *fields: str, why: str = "") -> Item:
    """Make an item of a sentence and the statement's fields that it comes from."""
    return Item(f"{_one_line(text)} ({', '.join(f'`{field}`' for field in fields)})", _one_line(why))


def _one_line(text: str) -> str:
    """Remove line breaks and control characters, since names in a run directory may come from a stranger."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def opening(statement: Statement) -> TextSection:
    """Return the lines at the top of each page; first, whether nothing is proven or the run is a simulation."""
    s = statement
    warnings = [fact(line, f"warnings[{i}]") for i, line in enumerate(s.warnings)]
    against = [fact(str(c), f"contradictions[{i}]") for i, c in enumerate(s.contradictions())]
    published = [fact(_PUBLISHED, "variant")] if s.variant == "published" else []
    return TextSection("", (fact(in_words(s), "in_words").text,), items=(*warnings, *against, *published))


def heading(name: str, statement: Statement) -> str:
    """Return the title of a page: its name, the method, and whether anything is proven."""
    return f"{name}: {_one_line(statement.method)} ({variant_of(statement)})"


def _why_not_alone(statement: Statement) -> str:
    """Return the reason why the proven epsilon of the promised view may not be quoted alone, or an empty string."""
    s = statement
    if math.isinf(s.proven.epsilon):
        return "nothing is proven"
    if SIMULATION_ONLY in s.warnings:
        return SIMULATION_ONLY
    refuted = s.contradiction(s.scope.view, "proven")
    return "an audit refutes the proof" if refuted is not None and refuted.label == "REFUTED" else ""


def asked(statement: Statement, *names: str) -> list[Item]:
    """Return the facts about the requested guarantee and the run: guarantee, target, noise multiplier, accountant, run."""
    lines = facts(statement)
    return [fact(f"{name}: {lines[name]}", *_FIELDS[name]) for name in names]


def numbers(statement: Statement) -> list[Item]:
    """Return claimed and proven epsilon of each view, each with unit, adjacency, view and delta; and caps by client."""
    found = []
    for i, of_view in enumerate(statement.views):
        proven, seen, claim = of_view.proven, of_view.seen_count, of_view.claimed
        label = "proven" if math.isfinite(proven.epsilon) else "nothing proven"
        found.append(fact(f"{label}: {proven}{f': {proven.reason}' if proven.reason else ''}", f"views[{i}].proven"))
        if seen is not None:
            guarantee = replace(proven, epsilon=seen)
            found.append(fact(f"proven if the number of participants is seen: {guarantee}", f"views[{i}].seen_count", "delta"))
        if claim is not None:
            found.append(fact(f"claimed: {claim}{f': {claim.note}' if claim.note else ''}", f"views[{i}].claimed"))
    for i, group in enumerate(statement.groups):
        cap = f"epsilon = {at_most(group.epsilon)} at {scope_line(statement)}"
        found.append(fact(f"proven for {group.clients} clients with a cap of their own: {cap}", f"groups[{i}]", "delta", "scope"))
    return found


def audits(statement: Statement) -> list[Item]:
    """Lower bounds and estimates from attacks on this configuration or run."""
    found = [
        fact(f"audited: {audit}", f"views[{i}].audits[{j}]")
        for i, numbers in enumerate(statement.views)
        for j, audit in enumerate(numbers.audits)
    ]
    return found or [fact("no audit was made", "views")]


def unit(statement: Statement) -> list[Item]:
    """Describe the protected unit, how neighbouring data differ, and the number of units."""
    scope = statement.scope
    compared = (
        f"{scope.unit} level, {scope.adjacency.replace('_', '-')}: the guarantee compares whether {unit_in_words(statement)}"
    )
    return [fact(compared, "scope"), fact(f"{statement.units} units of privacy", "units")]


def adversaries(statement: Statement) -> list[Item]:
    """Describe the adversary of each view; the one of the guarantee is marked."""
    own = statement.scope.view
    return [
        fact(f"{view} view{' (promised)' if view is own else ''}: {sees(statement, view)}", f"views[{i}].proven.scope")
        for i, view in enumerate(VIEWS)
    ]


def _exactness(statement: Statement) -> list[Item]:
    """Describe how noise is added; empty if nothing is proven."""
    return [Item(_INTEGERS)] if math.isfinite(statement.proven.epsilon) else []


def releases(statement: Statement) -> list[Item]:
    """Return the number of planned releases in the guarantee's view, by kind."""
    where, counts = f"views[{VIEWS.index(statement.scope.view)}].releases", Counter[str]()
    for release in statement.own.releases:
        counts[release.event] += release.count
    bounded = [fact(f"{count} planned releases, event = {kind}", where) for kind, count in counts.items() if kind != "unbounded"]
    return [*bounded, *([fact("releases without a bound on what they cost", where)] if "unbounded" in counts else [])]


def assumptions(statement: Statement) -> list[Item]:
    return [fact(a.what, f"assumptions[{i}]", why=a.why) for i, a in enumerate(statement.assumptions)]


def unprotected(statement: Statement) -> list[Item]:
    return [fact(line, f"not_protected[{i}]") for i, line in enumerate(statement.not_protected)]


def _fact_notes(statement: Statement) -> list[Item]:
    """Return notes on the numbers of the guarantee's view."""
    return [
        fact(f"{line} (at {scope_line(statement)})", f"notes[{i}]", "delta", "scope") for i, line in enumerate(statement.notes)
    ]


def utility(statement: Statement) -> list[Item]:
    """Compare the size of the noise with the size of the signal."""
    block = statement.learnability
    return [] if block is None else [fact(verdict_in_words(block), "learnability")]


class _Remaining:
    """Facts that a page divides among its questions; what no question asks for is left for the end, so that none is lost."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._left = list(items)

    def take(self, *words: str) -> list[Item]:
        """Return the remaining facts that contain one of these words, or all of them; each fact is returned once."""
        found = [item for item in self._left if not words or any(word in item.text for word in words)]
        self._left = [item for item in self._left if item not in found]
        return found


@dataclass(frozen=True)
class RunFigures:
    """Public facts of a run; what a run that has not ended, or an older one, lacks is empty.

    Args:
        data: name of the data set. rounds: finished ones. ended: why no more. metrics: of the last evaluation on test data.
        closing: digest of the closed ledger, 64 hex digits.
    """

    data: str = ""
    rounds: int | None = None
    ended: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    closing: str = ""

    def training(self) -> list[Item]:
        """Describe the training data and the length of training."""
        found = [fact(f"data set: {self.data}", "data.json: name")] if self.data else []
        if self.rounds is None:
            return [*found, fact("the run has not ended", "summary.json")]
        ended = f", ended {self.ended}" if self.ended else ""
        return [*found, fact(f"{self.rounds} rounds finished{ended}", "summary.json: rounds", "summary.json: ended")]

    def evaluation(self) -> list[Item]:
        """Return the public figures of the last evaluation."""
        return [fact(f"{name}: {number(value)}", f"summary.json: final.{name}") for name, value in self.metrics.items()]

    def checking(self) -> list[Item]:
        """Return the digest by which anybody can check the run."""
        if not self.closing:
            return [fact("the ledger is not closed: the run has no closing digest", "ledger.sqlite: closing")]
        text = f"closing digest {self.closing}, to be checked by `fedveil verify RUN --pin DIGEST`"
        return [fact(text, "ledger.sqlite: closing")]


def read_run_figures(run: Path, closing: str) -> RunFigures:
    """Read the public figures of a run directory, never those of its private folder.

    Args:
        closing: the digest that verification found at the end of the ledger, or an empty string.

    Raises:
        ConfigError: one of its files is damaged.
    """
    summary, card = (_json(run / name) for name in ("summary.json", "data.json"))
    final = summary.get("final", {})
    metrics = {name: value for name, value in sorted(final.items()) if name.startswith("test_") and isinstance(value, float)}
    return RunFigures(card.get("name", ""), summary.get("rounds"), summary.get("ended", ""), metrics, closing)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if isinstance(value, dict):
            return value
        problem = "not an object"
    except (OSError, ValueError, RecursionError) as error:
        problem = str(error)
    raise ConfigError(f"{path} cannot be read ({problem}): give a run directory as `fedveil run` left it")


_IMPACT_TITLE = "Facts for a data protection impact assessment"
_DISCLAIMER = (
    "This is no data protection impact assessment and no legal advice. It holds the facts about the method that an assessment "
    "under GDPR Article 35(7) asks for; each part ends with what remains for the controller to answer."
)
_REMAINS = "Remains the controller's: "


def _impact_facts(s: Statement, run: RunFigures | None) -> Iterator[TextSection]:
    """Yield one section for each point of Article 35(7)."""
    yield TextSection("What this is", (_DISCLAIMER,))
    processing = [*asked(s, "run"), *(run.training() if run else ()), *unit(s), *adversaries(s)]
    yield TextSection(
        "(a) The processing",
        (
            _REMAINS + "purposes, legitimate interest, kinds of data and of people, origin of the data, recipients, time of "
            "storage, and who operates the server and the clients.",
        ),
        items=tuple(processing),
    )
    cost = [*asked(s, "target"), *releases(s), *utility(s), *(run.evaluation() if run else ())]
    yield TextSection(
        "(b) Necessity and proportionality, as far as the method tells",
        (
            _REMAINS + "whether the purpose needs these data, whether less would do, the legal basis, and how people exercise "
            "their rights.",
        ),
        items=tuple(cost),
    )
    risks = [*numbers(s), *_fact_notes(s), *audits(s), *unprotected(s)]
    yield TextSection(
        "(c) Risks: what is proven, and what is not protected",
        (_REMAINS + "how likely and how severe these risks are for the people concerned, and all risks outside of training.",),
        items=tuple(risks),
    )
    measures = [*asked(s, "noise multiplier", "accountant"), *assumptions(s), *(run.checking() if run else ())]
    yield TextSection(
        "(d) Measures, and what must be ensured for the proof to hold",
        (
            _REMAINS + "security of data and machines, how each assumption is ensured, the advice of the data protection "
            "officer, the views of the people concerned, and whether the authority must be consulted.",
        ),
        items=tuple(measures),
    )


_CARD_TITLE = "Model card"
_AUTHORS = (
    "Only the authors can say: licence, intended and excluded uses, languages, origin of the data, who trained the model, and "
    "how it does on groups of people."
)


def header(s: Statement) -> str:
    """Return the YAML header; every value is a plain word."""
    tags = sorted({"federated-learning", s.method, *([] if _why_not_alone(s) else ["differential-privacy"])})
    return "\n".join(["---", "library_name: fedveil", "tags:", *(f"- {_one_line(tag)}" for tag in tags), "---"])


def _model_card(s: Statement, run: RunFigures | None) -> Iterator[TextSection]:
    """Return the sections of the card."""
    training = [*asked(s, "run", "noise multiplier"), *(run.training() if run else ())]
    yield TextSection("Training", items=tuple(training))
    if run is not None:
        nothing = () if run.metrics else ("No evaluation is recorded.",)
        yield TextSection("Evaluation", nothing, items=tuple(run.evaluation()))
    privacy = [*asked(s, "promise", "target", "accountant"), *unit(s), *numbers(s), *audits(s)]
    yield TextSection("Privacy", items=(*privacy, *_fact_notes(s)))
    if s.assumptions:
        yield TextSection("What the proof rests on", items=tuple(assumptions(s)))
    yield TextSection("Limits: what is not protected", items=tuple(unprotected(s)))
    if run is not None:
        yield TextSection("How to check it", items=tuple(run.checking()))
    yield TextSection("To be added", (_AUTHORS,))


_NIST_TITLE = "Answers to the questions of NIST SP 800-226"
_NOT_OURS = "Not ours: "


def _nist_answers(s: Statement, run: RunFigures | None) -> Iterator[TextSection]:
    """Yield one section per question."""
    limits, rests, notes = (_Remaining(f(s)) for f in (unprotected, assumptions, _fact_notes))
    yield _answer("Privacy parameters: which epsilon and delta?", numbers(s), asked(s, "target"))
    several = [*notes.take("several records", "clips whole clients"), *limits.take("a client as a whole")]
    yield _answer("Unit of privacy: what is protected, and how do neighbouring data differ?", unit(s), several)
    population = limits.take("what holds for the population")
    yield _answer("Promise: what may still be learned about people?", population, other="whether learning that harms a group.")
    yield _answer("Threat model and trust: who is the adversary, and who must be trusted?", adversaries(s), limits.take("sizes"))
    sampling = [*rests.take("joins each", "drawn afresh"), *notes.take("drawn afresh"), *limits.take("number of participants:")]
    yield _answer("Sampling: is the sample drawn, and kept secret, as the proof needs it?", asked(s, "run"), sampling)
    mechanism = [*asked(s, "noise multiplier"), *audits(s), *(run.checking() if run else ())]
    yield _answer("Mechanism and implementation: is the algorithm right, and does the code do it?", mechanism)
    exact = [*_exactness(s), *rests.take("sampler is ideal"), *notes.take("noise sampler")]
    yield _answer("Floating point: does the released number format leak?", exact)
    composed = [*asked(s, "accountant"), *releases(s), *rests.take("takes part in more than")]
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
    yield _answer("Utility: what does the noise cost?", utility(s), run.evaluation() if run else [])
    bias = "noise and clipping can cost small groups more than large ones; measure the model on data of each group."
    yield _answer("Bias: who pays for the noise?", other=bias)
    yield _answer("Assumptions: what else does the proof rest on?", rests.take(), [*notes.take(), *limits.take()])


def _answer(question: str, *items: list[Item], other: str = "") -> TextSection:
    """Make a section from the statement's items; it says so if others must answer, or if nothing is proven."""
    found = tuple(item for group in items for item in group)
    text = _NOT_OURS + other if other else "" if found else "No answer: nothing is proven."
    return TextSection(question, (text,) if text else (), items=found)


CURATORS = (
    "deployment.administrative.registry_authors",
    "deployment.basic.data_curators",
    "deployment.basic.data_product_region",
    "deployment.basic.intended_use",
    "deployment.basic.name",
    "deployment.basic.publication_date",
    "url_slug",
)
"""Required fields that no statement can fill."""


def _registry_entry(s: Statement, run: RunFigures | None) -> str:
    """Return the entry as JSON, which is YAML as well; keys are sorted."""
    return json.dumps({"deployment": _deployment(s, run)}, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _deployment(s: Statement, run: RunFigures | None) -> dict[str, Any]:
    limits, withheld = _Remaining(unprotected(s)), _why_not_alone(s)
    tuning = limits.take("hyper-parameter tuning")
    missing = f"To be added by the curator before submission: {', '.join(CURATORS)}."
    checking = run.checking() if run else []
    return {
        "basic": {"data_product_type": "Machine learning model", "description": _description(s)},
        "dp_variant": {
            **({} if withheld else {"variant_name": "Approximate DP"}),
            "data_domain": _lines([*asked(s, "run"), *(run.training() if run else ())]),
            "unprotected_quantities": _lines(limits.take()),
        },
        "privacy_loss": _privacy_loss(s),
        "deployment_model": {
            "model_name": "Federated",
            "actors": _lines(adversaries(s)),
            "trust_assumptions": _lines(assumptions(s)) or "None is listed, since nothing is proven.",
            "data_source_type": "Static",
            "access_type": "Non-interactive",
        },
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": _lines(tuning),
            "mechanisms": _lines([*asked(s, "noise multiplier"), *_exactness(s), *audits(s), *checking]),
            "composition": _lines([*asked(s, "accountant"), *releases(s)]),
            "utility": _lines([*utility(s), *(run.evaluation() if run else ())]) or "Not stated.",
            "additional_information": missing,
        },
        "administrative": {"status": "Draft", "tier": 1 if withheld else 3},
    }


def _privacy_loss(s: Statement) -> dict[str, Any]:
    """Return unit and parameters of the promised view, without numbers that may not be quoted alone."""
    where, withheld = f"views[{VIEWS.index(s.scope.view)}].proven", _why_not_alone(s)
    parameters = {"epsilon": s.proven.epsilon, "delta": s.delta}
    names = ", ".join(f"{name} (`{where}.{name}`)" for name in parameters)
    lead = f"No parameters are given: {withheld}." if withheld else f"{names}: {asked(s, 'promise')[0].text}"
    return {
        "privacy_unit": f"{s.scope.unit} level",
        "privacy_unit_details": _lines(unit(s)),
        "number_of_privacy_units": s.units,
        **({} if withheld else {"privacy_parameters": parameters}),
        "privacy_parameters_details": "\n".join([lead, _lines([*numbers(s), *_fact_notes(s)])]),
    }


def _description(s: Statement) -> str:
    section: TextSection = opening(s)
    return "\n".join(filter(None, [f"{heading('A model', s)}.", _lines(section.items), *section.paragraphs]))


def _lines(items: Iterable[Item]) -> str:
    return "\n".join(f"- {item.text}{f' (why: {item.why})' if item.why else ''}" for item in items)


Institution = Literal["nist", "registry", "dpia", "model-card"]


def for_institution(statement: Statement, institution: Institution, run: RunFigures | None = None) -> str:
    """Return the statement as one institution asks for it, with the figures of a run if there are any; deterministic."""
    if institution == "registry":
        return _registry_entry(statement, run)
    title, sections = _PAGES[institution]
    parts = [header(statement)] if institution == "model-card" else []
    parts += [f"# {heading(title, statement)}", *markdown_section(opening(statement), titled=False)]
    for section in sections(statement, run):
        parts += markdown_section(section)
    return "\n\n".join(parts) + "\n"


_PAGES = {"nist": (_NIST_TITLE, _nist_answers), "dpia": (_IMPACT_TITLE, _impact_facts), "model-card": (_CARD_TITLE, _model_card)}
