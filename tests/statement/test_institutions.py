"""A statement as institutions ask for it: exact text, schema, every number from the field beside it, nothing lost or hidden."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from federation_runs import config
from fedveil.accounting.types import Audit, View, at_most, small
from fedveil.experiment.certify import certify_config
from fedveil.experiment.config import Config, configure
from fedveil.statement.institutions import CURATORS, Institution, RunFigures, for_institution, read_run_figures
from fedveil.statement.statement import GroupNumbers, Statement
from fedveil.statement.statement_layout import to_dict
from schema_check import schema_errors

DATA = Path(__file__).parent / "data"
INSTITUTIONS: tuple[Institution, ...] = get_args(Institution)
FIGURES = RunFigures("digits", 3, "after its last round", {"test_accuracy": 0.8125, "test_loss": 0.5}, "ab" * 32)
NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w|\.\d)")


def _config(**sections: Any) -> Config:
    """200 clients, 50 expected a round by Poisson sampling, client level, in the aggregate view."""
    base: dict[str, Any] = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": 200}},
        "model": {"name": "linear"},
        "method": {"name": "dp-fedavg", "clip": 0.5},
        "training": {"rounds": 16, "clients_per_round": 50, "sampling": "poisson"},
        "privacy": {"noise_multiplier": 2.0, "delta": 1e-5, "unit": "client", "adjacency": "zero_out", "view": "aggregate"},
    }
    return configure(**{name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}})


CONFIGS = {
    "proven": _config(),
    "published": config({"name": "aldp-fl", "variant": "published"}, "server"),
    "simulated": _config(run={"seeded_noise": True}),
    "records": _config(
        training={"local": "dp-sgd", "batch_size": 2, "sampling": "fixed"},
        privacy={"unit": "record", "view": "server"},
    ),
    "no noise": _config(privacy={"noise_multiplier": 0.0}),
}


@pytest.fixture(scope="module")
def statements() -> dict[str, Statement]:
    return {name: certify_config(of) for name, of in CONFIGS.items()}


def audited(s: Statement, epsilon: float, *, rigorous: bool = True) -> Statement:
    return s.with_audits([Audit(epsilon, s.delta, s.scope, "one-shot", 0.95, 1000, rigorous)])


def pages(s: Statement, run: RunFigures | None = None) -> dict[str, str]:
    return {name: for_institution(s, name, run) for name in INSTITUTIONS if name != "registry"}


def entry(s: Statement, run: RunFigures | None = None) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(for_institution(s, "registry", run))
    return value


# --- the exact text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("institution", ["nist", "dpia", "model-card"])
@pytest.mark.parametrize("name", ["proven", "published"])
def test_the_text_to_the_byte(statements: dict[str, Statement], name: str, institution: Institution) -> None:
    assert for_institution(statements[name], institution, FIGURES) == (DATA / f"{name}-{institution}.md").read_text()


@pytest.mark.parametrize("name", ["proven", "published"])
def test_the_entry_to_the_byte_but_for_the_last_digits_of_epsilon(statements: dict[str, Statement], name: str) -> None:
    text = for_institution(statements[name], "registry", FIGURES)
    found, wanted = json.loads(text), json.loads((DATA / f"{name}-registry.json").read_text())
    assert text == json.dumps(found, indent=2, sort_keys=True) + "\n"
    numbers = [value["deployment"]["privacy_loss"].pop("privacy_parameters", {}) for value in (found, wanted)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-9)
    assert found == wanted


def test_the_same_input_gives_the_same_bytes(statements: dict[str, Statement]) -> None:
    for name, of in CONFIGS.items():
        again = certify_config(of)
        assert all(for_institution(again, kind) == for_institution(statements[name], kind) for kind in INSTITUTIONS)


# --- every number comes from the field beside it ------------------------------------------------------------------------------


def values_at(field: str, s: Statement) -> Iterator[Any]:
    """All numbers and texts at and below a field of the statement or of the run; none where the words are no field."""
    figures = {f"summary.json: final.{name}": value for name, value in FIGURES.metrics.items()}
    run = {"data.json: name": FIGURES.data, "summary.json: rounds": FIGURES.rounds, "ledger.sqlite: closing": FIGURES.closing}
    where: Any = {**to_dict(s), **run, **figures}
    for step in [field] if field in where else re.findall(r"\w+", field):
        if isinstance(where, dict) and step not in where:
            return
        where = where[int(step)] if isinstance(where, list) else where[step]
    if field.endswith("releases"):
        yield sum(release["count"] for release in where)
    yield from below(where)


def below(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from below(item)
    else:
        yield value


def untraced(text: str, s: Statement) -> list[str]:
    """The numbers of a page that are not those of the fields named on their line, in as many digits as are shown."""
    lost = []
    for line in text.splitlines():
        known = [value for field in re.findall(r"`([^`]*)`", line) for value in values_at(field, s)]
        shown = {form(value) for value in known if isinstance(value, int | float) for form in FORMS}
        shown |= {n for value in known if isinstance(value, str) for n in NUMBER.findall(value)}
        plain = re.sub(r"`[^`]*`|SP 800-226|Article 35\(7\)", "", line)
        lost += [n for n in NUMBER.findall(plain) if n not in shown]
    return lost


FORMS = [
    at_most,
    small,
    str,
    "{:.3g}".format,
    "{:.4g}".format,
    "{:.6g}".format,
    "{:.0%}".format,
    lambda share: f"{share:.0%}"[:-1],
]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_is_that_of_the_field_beside_it(statements: dict[str, Statement], name: str) -> None:
    plain = statements[name]
    capped = replace(plain, groups=(GroupNumbers(1.515, 20), GroupNumbers(2.525, 180)))
    for s in (plain, capped, audited(plain, 1.25), audited(plain, 400.0, rigorous=False)):
        for text in (*pages(s).values(), *pages(s, FIGURES).values()):
            assert untraced(text, s) == []
        assert untraced("\n".join(v for v in below(entry(s, FIGURES)) if isinstance(v, str)), s) == []


def test_a_number_from_elsewhere_is_found(statements: dict[str, Statement]) -> None:
    s = statements["proven"]
    epsilon = at_most(s.proven.epsilon)
    card = pages(s, FIGURES)["model-card"]
    assert set(untraced(card.replace(f"proven: epsilon = {epsilon}", "proven: epsilon = 0.5"), s)) == {"0.5"}
    assert untraced(card.replace("0.8125", "0.99"), s) == ["0.99"]


@pytest.mark.parametrize("name", CONFIGS)
def test_no_epsilon_stands_without_delta_unit_adjacency_and_view(statements: dict[str, Statement], name: str) -> None:
    s = audited(statements[name], 1.25)
    lines = [line for text in pages(s).values() for line in text.splitlines() if "epsilon =" in line]
    assert all(re.search(r"delta = [\d.e-]+.* level, (zero-out|replace-one), \w+ view", line) for line in lines)
    assert len(lines) >= 3 * len(s.views)


# --- nothing lost, nothing hidden ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_each_sentence_of_the_statement_stands_once_on_each_page(statements: dict[str, Statement], name: str) -> None:
    s = audited(statements[name], 400.0)
    sentences = [*s.warnings, *s.not_protected, *s.notes, *(a.what for a in s.assumptions), *(a.why for a in s.assumptions)]
    for text in pages(s).values():
        counts = {sentence: len(re.findall(rf"^- {re.escape(sentence)}(?= )", text, re.M)) for sentence in sentences}
        assert {k for k, n in counts.items() if n != 1} == {a.why for a in s.assumptions}
        assert all(a.why in text for a in s.assumptions)
        assert all(str(c) in text for c in s.contradictions())


def test_what_a_reader_must_know_stands_on_top(statements: dict[str, Statement]) -> None:
    for text in pages(statements["published"]).values():
        top = text.split("\n## ")[0]
        assert "(published)" in top
        assert "published variant: the method as its paper prints it" in top
        assert top.index("Simulation only: noise is reproducible") < top.index("Nothing is proven against the server")
    for text in pages(statements["no noise"]).values():
        title, paragraph = text[text.index("# ") :].split("\n\n")[:2]
        assert title.endswith("(nothing proven)")
        assert paragraph.startswith("Nothing is proven against")
        assert "\n- proven: " not in text
    for text in pages(statements["simulated"]).values():
        assert text[text.index("# ") :].split("\n\n")[1].startswith("Simulation only: noise is reproducible, no privacy.")


def test_questions_that_a_statement_cannot_answer_are_marked(statements: dict[str, Statement]) -> None:
    sections = pages(statements["proven"])["nist"].split("\n## ")[1:]
    marked = [section.split(":")[0] for section in sections if "\nNot ours: " in section]
    assert marked == ["Promise", "Composition over time", "Security and access control", "Data collection exposure", "Bias"]
    assert not any("No answer" in section for section in sections)
    sections = pages(statements["no noise"])["nist"].split("\n## ")[1:]
    assert [s.split(":")[0] for s in sections if "No answer: nothing is proven." in s] == [
        *("Floating point", "Utility", "Assumptions"),
    ]


@pytest.mark.parametrize("name", ["proven", "records"])
def test_each_sentence_answers_its_own_question(statements: dict[str, Statement], name: str) -> None:
    sections = {s.split(":")[0]: s for s in pages(statements[name])["nist"].split("\n## ")[1:]}
    homes = {
        "the noise sampler is within": "Floating point",
        "hyper-parameter tuning: runs": "Tuning",
        "absence, refusals and running time": "Side channels",
        "figures of a simulation": "Security and access control",
        "noise comes from a secret": "Assumptions",
        "a client as a whole": "Unit of privacy",
        " joins each ": "Sampling",
    }
    found = {sentence: [home for home, text in sections.items() if sentence in text] for sentence in homes}
    whole = {"a client as a whole": []} if name == "proven" else {}
    assert found == {sentence: [home] for sentence, home in homes.items()} | whole


# --- the registry's schema ----------------------------------------------------------------------------------------------------

SCHEMA = json.loads((DATA / "registry-schema.json").read_text())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_entry_lacks_only_what_its_curator_knows(statements: dict[str, Statement], name: str) -> None:
    found = entry(statements[name], FIGURES)
    assert sorted(schema_errors(found, SCHEMA)) == [f"{field}: missing" for field in CURATORS]
    assert all(field in found["deployment"]["implementation"]["additional_information"] for field in CURATORS)
    assert list(schema_errors(filled_in(found), SCHEMA)) == []


def filled_in(found: dict[str, Any]) -> dict[str, Any]:
    whole = copy.deepcopy(found)
    texts = {"name": "M", "intended_use": "u", "data_product_region": "r", "publication_date": "2026-01-31"}
    curators = [{"data_curator_name": "c", "data_curator_type": "Nonprofit"}]
    whole["url_slug"] = "m"
    whole["deployment"]["basic"] |= {**texts, "data_curators": curators}
    whole["deployment"]["administrative"]["registry_authors"] = ["a"]
    return whole


def test_the_schema_refuses_what_the_registry_refuses(statements: dict[str, Statement]) -> None:
    good = filled_in(entry(statements["proven"]))
    for path, value in {
        "deployment.basic.publication_date": "31.1.2026",
        "deployment.basic.data_product_type": "Model",
        "deployment.privacy_loss.number_of_privacy_units": "200",
        "deployment.privacy_loss.privacy_parameters.epsilon": "inf",
        "deployment.administrative.tier": 4,
        "deployment.administrative.registry_authors": [],
        "deployment.surprise": "",
    }.items():
        bad = copy.deepcopy(good)
        *folders, last = path.split(".")
        where = bad
        for folder in folders:
            where = where[folder]
        where[last] = value
        assert [error.split(":")[0] for error in schema_errors(bad, SCHEMA)] == [path]


def test_the_parameters_are_those_of_the_statement(statements: dict[str, Statement]) -> None:
    s = statements["proven"]
    loss = entry(s)["deployment"]["privacy_loss"]
    assert loss["privacy_parameters"] == {"epsilon": s.view(View.AGGREGATE).proven.epsilon, "delta": 1e-5}
    assert loss["number_of_privacy_units"] == s.units == 200


def test_an_epsilon_that_must_not_stand_alone_is_no_parameter(statements: dict[str, Statement]) -> None:
    """Nothing proven, reproducible noise, refuted by an audit; an estimate only doubts, and is shown."""
    proven = statements["proven"]
    withheld = {
        "nothing is proven": statements["no noise"],
        "simulation only: noise is reproducible, no privacy": statements["simulated"],
        "an audit refutes the proof": audited(proven, 400.0),
    }
    for reason, s in withheld.items():
        deployment = entry(s)["deployment"]
        assert "privacy_parameters" not in deployment["privacy_loss"]
        assert f"No parameters are given: {reason}." in deployment["privacy_loss"]["privacy_parameters_details"]
        assert deployment["administrative"]["tier"] == 1
        assert "differential-privacy" not in pages(s)["model-card"]
    assert "privacy_parameters" in entry(audited(proven, 400.0, rigorous=False))["deployment"]["privacy_loss"]
    assert math.isfinite(proven.proven.epsilon)


# --- runs ---------------------------------------------------------------------------------------------------------------------


def test_a_run_adds_its_public_figures_alone(tmp_path: Path, statements: dict[str, Statement]) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "summary.json").write_text('{"final": {"test_secret": 0.123}}')
    (tmp_path / "summary.json").write_text(
        '{"rounds": 3, "ended": "after its last round", "final": {"round": 2, "test_accuracy": 0.75, "train_loss": 0.321}}'
    )
    (tmp_path / "data.json").write_text('{"name": "digits\\n# Proven: epsilon = 0.01"}')
    figures = read_run_figures(tmp_path, "cd" * 32)
    card = for_institution(statements["proven"], "model-card", figures)
    assert "- test_accuracy: 0.75 (`summary.json: final.test_accuracy`)" in card
    assert f"closing digest {'cd' * 32}" in card
    assert "0.123" not in card
    assert "0.321" not in card
    assert "\n# Proven" not in card


def test_a_run_that_has_not_ended_says_so(tmp_path: Path, statements: dict[str, Statement]) -> None:
    card = for_institution(statements["proven"], "model-card", read_run_figures(tmp_path, ""))
    assert "- the run has not ended (`summary.json`)" in card
    assert "No evaluation is recorded." in card
    assert "the run has no closing digest" in card


def test_names_of_strangers_start_no_line(statements: dict[str, Statement]) -> None:
    forged = replace(statements["proven"], method="x\n---\n# Proven", not_protected=("all\n- proven: epsilon = 0.01",))
    for text in pages(forged).values():
        assert not re.search(r"^(# Proven|- proven: epsilon = 0.01)", text, re.M)
        assert text.count("\n---\n") <= 1
