"""The numbers of a statement beside the configuration, the ledger's rows, and a second computation of every epsilon."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fedveil.verify.finding import Findings
from fedveil.verify.row_costs import RowCosts
from fedveil.verify.second_path import Curve

EXACT, NUMERIC = 1e-6, 1e-3
"""Relative agreement of epsilons in closed form, and of those by loss distributions on two grids, both from above."""
FPR = 0.05  # at which a statement quotes `tpr`
_VIEWS = ("server", "aggregate", "final")
Json = Mapping[str, Any]


def check_configuration(findings: Findings, statement: Json, config: Json, card: Json) -> None:
    """What the statement repeats of the configuration and of the data card."""
    privacy, training, clients = config["privacy"], config["training"], card["clients"]
    each = 1 if privacy["unit"] == "client" else max(card["nominal_examples_per_client"], 1)
    pairs = {
        "method.name": (config["method"]["name"], statement["method"]),
        "privacy.epsilon": (privacy.get("epsilon"), statement["target_epsilon"]),
        "privacy.delta": (privacy["delta"], statement["delta"]),
        "training.clients_per_round": (training.get("clients_per_round", clients), statement["cohort"]),
        "number of clients": (clients, statement["clients"]),
        "number of units": (clients * each, statement["units"]),
        **{f"training.{key}": (training.get(key, statement[key]), statement[key]) for key in ("rounds", "sampling")},
        **{f"privacy.{key}": (privacy[key], statement["scope"][key]) for key in ("unit", "adjacency", "view")},
    }
    for view, numbers in zip(_VIEWS, statement["views"], strict=True):
        pairs[f"scope ({view})"] = ({**statement["scope"], "view": view}, numbers["proven"]["scope"])
        pairs[f"delta ({view})"] = (statement["delta"], numbers["proven"]["delta"])
        for rate in (release["rate"] for release in numbers["releases"] if release["rate"] and privacy["unit"] == "client"):
            pairs[f"sampling rate ({view})"] = (statement["cohort"] / clients, rate)
    findings.agree("statement and configuration", pairs)


def check_statement(findings: Findings, statement: Json, page: str) -> None:
    """Every proven number from the releases that the statement lists, by a second path; and the page beside it."""
    for view, numbers in zip(_VIEWS, statement["views"], strict=True):
        subject, stated = f"proven epsilon ({view} view)", float(numbers["proven"]["epsilon"])
        curve = _planned(numbers, statement)
        tolerance, tpr = EXACT if curve.exact else NUMERIC, curve.true_positives(FPR)
        right = stated == curve.epsilon or math.isclose(stated, curve.epsilon, rel_tol=tolerance)
        blunt = not curve.exact and (numbers["proven"]["accountant"] != "pld" or stated > 100)  # less sharp, and still a bound
        right = right or (blunt and curve.epsilon < stated < math.inf)
        findings.check(right, subject, f"{curve.epsilon:.9g} by a second path", f"{stated:.9g}")
        if not curve.exact:
            tpr = min(max(numbers["tpr"], tpr * (1 - tolerance)), 1.0)
        mu = curve.mu if curve.exact and math.isfinite(stated) else None
        findings.agree(f"mu and tpr ({view} view)", {"mu": (mu, numbers["mu"]), "tpr": (tpr, numbers["tpr"])})
    on_page = {float(text.rstrip(".")) for text in re.findall(r"\d[\d.]*(?:e[+-]?\d+)?", page)}
    lacking = [n for n in _numbers(statement) if on_page.isdisjoint({float(f"{n:.4g}"), float(f"{n:g}")})]
    right = not lacking and page.startswith(f"# Privacy statement: {statement['method']} (")
    findings.check(right, "statement.md", "the numbers of statement.json", "the same numbers" if right else f"no {lacking}")


def check_rows(findings: Findings, spent: RowCosts, statement: Json, complete: bool) -> None:
    """The rows, and their sum beside the proven epsilon of the run's view; in a complete run of aggregates it is the plan's."""
    findings.check(
        not spent.wrong, "rows", "the statement's scope, and costs as they follow", spent.wrong or "each as it should be"
    )
    view, target = statement["scope"]["view"], statement["target_epsilon"]
    own = statement["views"][_VIEWS.index(view)]
    proven, subject = float(own["proven"]["epsilon"]), f"epsilon spent ({view} view)"
    curve, plan = spent.curve(statement["delta"], _pair(statement)), _planned(own, statement)
    epsilon, tolerance = curve.epsilon, EXACT if curve.exact else NUMERIC
    least = plan.epsilon if complete and view == "aggregate" and math.isfinite(plan.epsilon) else 0.0
    most = math.inf if view == "final" else proven  # which is of the last model alone
    right = least * (1 - tolerance) <= epsilon <= most * (1 + tolerance)
    findings.check(right, subject, f"{least:.9g} to {most:.9g}", f"{epsilon:.9g}")
    right = target is None or proven <= target * (1 + EXACT) or proven == math.inf
    findings.check(right, "target epsilon", f"at most {target}", f"{proven:.9g}")


def _numbers(value: Any) -> Iterator[float]:
    """Every number of the statement that its page shows, too; the others are computed again."""
    if isinstance(value, int | float):
        yield value
    inner = value if isinstance(value, list) else []
    if isinstance(value, dict):
        inner = [item for key, item in value.items() if key not in ("mu", "tpr", "releases", "units", "target_ratio")]
    for item in inner:
        yield from _numbers(item)


def _pair(statement: Json) -> str:
    """The worst-case pair of a sampled release: replacing, where one record moves the clipped update of its client."""
    steps = any(release["event"] == "sampled_gaussian" for view in statement["views"][:1] for release in view["releases"])
    return str(statement["scope"]["adjacency"]) if statement["scope"]["unit"] == "client" or steps else "replace_one"


def _planned(numbers: Json, statement: Json) -> Curve:
    costs = RowCosts((), 0)
    for release in numbers["releases"]:
        costs.count(-1, release)
    return costs.curve(statement["delta"], _pair(statement))
