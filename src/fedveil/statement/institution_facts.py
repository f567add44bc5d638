"""What the statements for institutions share: the facts of a privacy statement, each with the fields that it comes from.

A field is named as a path into the statement's JSON (`fedveil certify --json`, `statement.json` of a run); the sentences are
those of the statement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from fedveil.accounting.formatting import at_most
from fedveil.statement.plain_words import SEES, in_words, scope_line, unit_in_words, verdict_in_words
from fedveil.statement.statement import SIMULATION_ONLY, VIEWS, Statement
from fedveil.statement.statement_text import Item, TextSection, facts, variant_of

_FIELDS = {
    "promise": ("delta", "scope"),
    "target": ("target_epsilon", "delta", "scope"),
    "noise multiplier": ("noise_multiplier",),
    "accountant": ("accountant",),
    "run": ("cohort", "clients", "sampling", "rounds", "dimension"),
}
INTEGERS = "what leaves with a guarantee is integers with integer noise, whose law is proven in docs/exact-release.md of fedveil"
PUBLISHED = "published variant: the method as its paper prints it; what the paper claims is no proof"


def fact(text: str, *fields: str, why: str = "") -> Item:
    """A sentence, and the fields of the statement that it comes from."""
    return Item(f"{one_line(text)} ({', '.join(f'`{field}`' for field in fields)})", one_line(why))


def one_line(text: str) -> str:
    """The text without line breaks and control characters: names in a run directory may be a stranger's."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def opening(statement: Statement) -> TextSection:
    """What stands on top of each page: that nothing is proven or that it is a simulation, before anything else."""
    s = statement
    warnings = [fact(line, f"warnings[{i}]") for i, line in enumerate(s.warnings)]
    against = [fact(str(c), f"contradictions[{i}]") for i, c in enumerate(s.contradictions())]
    published = [fact(PUBLISHED, "variant")] if s.variant == "published" else []
    return TextSection("", (fact(in_words(s), "in_words").text,), items=(*warnings, *against, *published))


def heading(name: str, statement: Statement) -> str:
    """The title of a page: its name, the method, and whether anything is proven."""
    return f"{name}: {one_line(statement.method)} ({variant_of(statement)})"


def why_not_alone(statement: Statement) -> str:
    """Why the proven epsilon of the promised view may not be quoted alone; empty where it may."""
    s = statement
    if math.isinf(s.proven.epsilon):
        return "nothing is proven"
    if SIMULATION_ONLY in s.warnings:
        return SIMULATION_ONLY
    refuted = s.contradiction(s.scope.view, "proven")
    return "an audit refutes the proof" if refuted is not None and refuted.label == "REFUTED" else ""


def asked(statement: Statement, *names: str) -> list[Item]:
    """What was asked for, and of which run: those of promise, target, noise multiplier, accountant, run."""
    lines = facts(statement)
    return [fact(f"{name}: {lines[name]}", *_FIELDS[name]) for name in names]


def numbers(statement: Statement) -> list[Item]:
    """Claimed and proven epsilon of each view, each with unit, adjacency, view and delta; caps by client."""
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
    """What is protected, how the neighbouring data differ, and how many units there are."""
    scope = statement.scope
    compared = (
        f"{scope.unit} level, {scope.adjacency.replace('_', '-')}: the guarantee compares whether {unit_in_words(statement)}"
    )
    return [fact(compared, "scope"), fact(f"{statement.units} units of privacy", "units")]


def adversaries(statement: Statement) -> list[Item]:
    """Who the adversary of each view is, the promised one marked."""
    own = statement.scope.view
    return [
        fact(f"{view} view{' (promised)' if view is own else ''}: {SEES[view]}", f"views[{i}].proven.scope")
        for i, view in enumerate(VIEWS)
    ]


def exactness(statement: Statement) -> list[Item]:
    """How noise is added; nothing where nothing is proven."""
    return [Item(INTEGERS)] if math.isfinite(statement.proven.epsilon) else []


def releases(statement: Statement) -> list[Item]:
    """How many releases the promised view sees by the plan, by their kind."""
    where, counts = f"views[{VIEWS.index(statement.scope.view)}].releases", Counter[str]()
    for release in statement.own.releases:
        counts[release.event] += release.count
    bounded = [fact(f"{count} planned releases, event = {kind}", where) for kind, count in counts.items() if kind != "unbounded"]
    return [*bounded, *([fact("releases without a bound on what they cost", where)] if "unbounded" in counts else [])]


def assumptions(statement: Statement) -> list[Item]:
    return [fact(a.what, f"assumptions[{i}]", why=a.why) for i, a in enumerate(statement.assumptions)]


def unprotected(statement: Statement) -> list[Item]:
    return [fact(line, f"not_protected[{i}]") for i, line in enumerate(statement.not_protected)]


def notes(statement: Statement) -> list[Item]:
    """How to read the numbers of the promised view."""
    return [
        fact(f"{line} (at {scope_line(statement)})", f"notes[{i}]", "delta", "scope") for i, line in enumerate(statement.notes)
    ]


def utility(statement: Statement) -> list[Item]:
    """How large the noise is beside what is to be learned."""
    block = statement.learnability
    return [] if block is None else [fact(verdict_in_words(block), "learnability")]


class Remaining:
    """Facts that a page divides among its questions; what no question asks for is left for the end, so that none is lost."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._left = list(items)

    def take(self, *words: str) -> list[Item]:
        """The facts that hold one of these words, each handed out once; without words all that are left."""
        found = [item for item in self._left if not words or any(word in item.text for word in words)]
        self._left = [item for item in self._left if item not in found]
        return found
