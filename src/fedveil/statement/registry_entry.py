"""An entry for OpenDP's Differential Privacy Deployments Registry: what the statement knows of it.

Field names and enumerations are those of schemas/deployments-schema.yaml in github.com/opendp/deployments-registry-data. What
only the curator knows is left out, never filled with a placeholder: the registry's own check refuses the entry until it is added.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from fedveil.statement import institution_facts as shared
from fedveil.statement.public_figures import RunFigures
from fedveil.statement.statement import VIEWS, Statement
from fedveil.statement.statement_text import Item, TextSection

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


def registry_entry(s: Statement, run: RunFigures | None) -> str:
    """The entry as JSON, which is YAML as well; keys are sorted."""
    return json.dumps({"deployment": _deployment(s, run)}, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _deployment(s: Statement, run: RunFigures | None) -> dict[str, Any]:
    limits, withheld = shared.Remaining(shared.unprotected(s)), shared.why_not_alone(s)
    tuning = limits.take("hyper-parameter tuning")
    missing = f"To be added by the curator before submission: {', '.join(CURATORS)}."
    checking = run.checking() if run else []
    return {
        "basic": {"data_product_type": "Machine learning model", "description": _description(s)},
        "dp_variant": {
            **({} if withheld else {"variant_name": "Approximate DP"}),
            "data_domain": _lines([*shared.asked(s, "run"), *(run.training() if run else ())]),
            "unprotected_quantities": _lines(limits.take()),
        },
        "privacy_loss": _privacy_loss(s),
        "deployment_model": {
            "model_name": "Federated",
            "actors": _lines(shared.adversaries(s)),
            "trust_assumptions": _lines(shared.assumptions(s)) or "None is listed, since nothing is proven.",
            "data_source_type": "Static",
            "access_type": "Non-interactive",
        },
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": _lines(tuning),
            "mechanisms": _lines([*shared.asked(s, "noise multiplier"), *shared.exactness(s), *shared.audits(s), *checking]),
            "composition": _lines([*shared.asked(s, "accountant"), *shared.releases(s)]),
            "utility": _lines([*shared.utility(s), *(run.evaluation() if run else ())]) or "Not stated.",
            "additional_information": missing,
        },
        "administrative": {"status": "Draft", "tier": 1 if withheld else 3},
    }


def _privacy_loss(s: Statement) -> dict[str, Any]:
    """Unit and parameters of the promised view; what may not be quoted alone is not among the parameters."""
    where, withheld = f"views[{VIEWS.index(s.scope.view)}].proven", shared.why_not_alone(s)
    parameters = {"epsilon": s.proven.epsilon, "delta": s.delta}
    names = ", ".join(f"{name} (`{where}.{name}`)" for name in parameters)
    lead = f"No parameters are given: {withheld}." if withheld else f"{names}: {shared.asked(s, 'promise')[0].text}"
    return {
        "privacy_unit": f"{s.scope.unit} level",
        "privacy_unit_details": _lines(shared.unit(s)),
        "number_of_privacy_units": s.units,
        **({} if withheld else {"privacy_parameters": parameters}),
        "privacy_parameters_details": "\n".join([lead, _lines([*shared.numbers(s), *shared.notes(s)])]),
    }


def _description(s: Statement) -> str:
    section: TextSection = shared.opening(s)
    return "\n".join(filter(None, [f"{shared.heading('A model', s)}.", _lines(section.items), *section.paragraphs]))


def _lines(items: Iterable[Item]) -> str:
    return "\n".join(f"- {item.text}{f' (why: {item.why})' if item.why else ''}" for item in items)
