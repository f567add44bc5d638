"""The numbers of a statement beside the configuration, the ledger's rows, and a second computation of every epsilon."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedveil.verify.finding import Finding, Findings
from fedveil.verify.row_costs import RowCosts

EXACT, NUMERIC = 1e-6, 1e-3
"""Relative agreement of epsilons in closed form, and of those by loss distributions on two grids, both from above."""
Json = Mapping[str, Any]


def check_configuration(findings: Findings, statement: Json, config: Json, clients: int | None) -> None:
    """What the statement repeats of the configuration and of the data card."""
    privacy, training = config["privacy"], config["training"]
    cohort = training.get("clients_per_round", clients)
    pairs = {
        "method.name": (config["method"]["name"], statement["method"]),
        "privacy.epsilon": (privacy.get("epsilon"), statement["target_epsilon"]),
        "privacy.delta": (privacy["delta"], statement["delta"]),
        "training.rounds": (training["rounds"], statement["rounds"]),
        "training.sampling": (training.get("sampling", statement["sampling"]), statement["sampling"]),
        "training.clients_per_round": (cohort, statement["cohort"]),
        "number of clients": (clients, statement["clients"]),
        **{f"privacy.{key}": (privacy[key], statement["scope"][key]) for key in ("unit", "adjacency", "view")},
    }
    wrong = [f"{key} = {expected!r}, not {found!r}" for key, (expected, found) in pairs.items() if expected != found]
    agreed = f"agrees on {', '.join(pairs)}"
    findings.check(not wrong, "statement and configuration", "; ".join(wrong), "another value" if wrong else agreed)
    scopes = {(v["proven"]["scope"]["unit"], v["proven"]["scope"]["adjacency"], v["proven"]["delta"]) for v in statement["views"]}
    one = (statement["scope"]["unit"], statement["scope"]["adjacency"], statement["delta"])
    findings.check(scopes == {one}, "scope of all views", one, " and ".join(map(str, sorted(scopes))))


def check_statement(findings: Findings, statement: Json) -> None:
    """Every proven epsilon from the releases that the statement lists, by a second path."""
    for view in statement["views"]:
        stated, subject = number(view["proven"]["epsilon"]), f"proven epsilon ({view['proven']['scope']['view']} view)"
        try:
            epsilon, exact = _planned(view["releases"], statement)
        except ValueError as problem:
            findings.append(Finding("unknown", subject, str(problem)))
            continue
        tolerance = EXACT if exact else NUMERIC
        if epsilon * (1 + tolerance) < stated < math.inf and not exact:
            findings.append(Finding("verified", subject, f"{stated:.9g}; a second path gives {epsilon:.9g}, which is sharper"))
        else:
            right = stated == epsilon or math.isclose(stated, epsilon, rel_tol=tolerance)
            findings.check(right, subject, f"{epsilon:.9g} by a second path", f"{stated:.9g}")
    target, proven = statement["target_epsilon"], number(own_view(statement)["proven"]["epsilon"])
    if target is not None:
        findings.check(
            proven <= target * (1 + EXACT) or proven == math.inf, "target epsilon", f"at most {target}", f"{proven:.9g}"
        )


def check_rows(findings: Findings, spent: RowCosts, statement: Json, complete: bool) -> None:
    """The rows, and their sum beside the proven epsilon of the run's view; in a complete run of aggregates it is the plan's."""
    for subject in ("scope of the rows", "cost of the rows"):
        findings.check(
            subject not in spent.wrong, subject, "what the statement and the row say", spent.wrong.get(subject, "right")
        )
    view, proven = statement["scope"]["view"], number(own_view(statement)["proven"]["epsilon"])
    subject = f"epsilon spent ({view} view)"
    try:
        epsilon, exact = spent.epsilon(statement["delta"], _pair(statement))
        planned, _ = _planned(own_view(statement)["releases"], statement)
    except ValueError as problem:
        findings.append(Finding("unknown", subject, str(problem)))
        return
    tolerance = EXACT if exact else NUMERIC
    least = planned if complete and view == "aggregate" and math.isfinite(planned) else 0.0
    expected = f"at most {proven:.9g}, the statement's" + (f", and {least:.9g}, the plan's" if least else "")
    if view == "final":
        findings.append(Finding("verified", subject, f"{epsilon:.9g} by all releases; {proven:.9g} is of the last model alone"))
    else:
        right = least * (1 - tolerance) <= epsilon <= proven * (1 + tolerance)
        findings.check(right, subject, expected, f"{epsilon:.9g}")


def own_view(statement: Json) -> Json:
    """The numbers of the view that the run promises."""
    found: Json = next(v for v in statement["views"] if v["proven"]["scope"]["view"] == statement["scope"]["view"])
    return found


def number(value: Any) -> float:
    """A number of strict JSON, in which infinity is a text."""
    return math.inf if value == "inf" else float(value)


def _pair(statement: Json) -> str:
    """The worst-case pair of a sampled release: replacing, where one record moves the clipped update of its client."""
    steps = any(release["event"] == "sampled_gaussian" for view in statement["views"][:1] for release in view["releases"])
    return str(statement["scope"]["adjacency"]) if statement["scope"]["unit"] == "client" or steps else "replace_one"


def _planned(releases: list[Json], statement: Json) -> tuple[float, bool]:
    """(epsilon, exact) of the planned releases of a view."""
    spent = RowCosts((), 0)
    for release in releases:
        spent.count(-1, release)
    return spent.epsilon(statement["delta"], _pair(statement))
