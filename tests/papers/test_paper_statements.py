"""The tables of the papers' numbered statements: none is left out, what they cite exists, and what they refute is refuted."""

from __future__ import annotations

import ast
import doctest
import math
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from fedveil.experiment.certify import certify_config
from fedveil.experiment.config_files import load_config
from fedveil.experiment.presets import presets
from fedveil.papers.fedglp_adp import claim as fedglp
from fedveil.studies.reproduce.recipe import rows
from fedveil.studies.reproduce.recipe_files import load_recipe
from fedveil.studies.reproduce.recipe_list import recipe_names
from kept_rows import KEPT, kept

ROOT = Path(__file__).parents[2]
KINDS = {"Eq": "Eq", "Fig": "Fig", "Theorem": "Theorem", "Lemma": "Lemma", "Corollary": "Corollary", "Corollarie": "Corollary"}
KINDS |= {kind: kind for kind in ("Definition", "Assumption", "Algorithm", "Table")}
PAGES: dict[str, dict[str, int]] = {
    "ladp-fl": {"Eq": 23, "Theorem": 5, "Corollary": 2, "Definition": 2, "Assumption": 4, "Algorithm": 4, "Table": 10, "Fig": 8},
    "fedglp-adp": {"Eq": 20, "Theorem": 1, "Lemma": 5, "Definition": 3, "Algorithm": 2, "Table": 6, "Fig": 3},
    "convergent-dp": {
        "Eq": 36,
        "Theorem": 4,
        "Lemma": 10,
        "Definition": 4,
        "Assumption": 1,
        "Algorithm": 1,
        "Table": 16,
        "Fig": 3,
    },
    "fedanc": {"Eq": 14, "Theorem": 2, "Corollary": 1, "Assumption": 3, "Algorithm": 1, "Table": 1, "Fig": 7},
    "aldp-fl": {"Eq": 21, "Algorithm": 2, "Table": 5, "Fig": 7},
}
"""By page, how many of each kind the paper numbers."""
ROMAN = {numeral: i for i, numeral in enumerate(["I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X"], 1)}


def text_of(page: str) -> str:
    return (ROOT / "docs" / "papers" / f"{page}.md").read_text(encoding="utf-8")


def cells(page: str) -> list[list[str]]:
    """The rows of a page's table of statements."""
    section = text_of(page).split("## Every numbered statement\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith(("| number", "|---"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def numbers(cell: str) -> list[tuple[str, int]]:
    """The statements that a first cell names: `Theorem 4, Eq. 16`, `Eqs. 17 to 19`, `Tables III, VII`."""
    found, kind = [], ""
    for part in cell.split(", "):
        match = re.fullmatch(r"(?:([A-Z][a-z]+?)s?\.? )?(\w+)(?: to (\w+))?", part)
        assert match, part
        kind = KINDS[match[1]] if match[1] else kind
        first, last = (ROMAN.get(end) or int(end) for end in (match[2], match[3] or match[2]))
        found += [(kind, i) for i in range(first, last + 1)]
    return found


@cache
def defined(path: Path) -> set[str]:
    """Names of functions, classes, methods and constants in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return named | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


@cache
def names_of_tests() -> set[str]:
    return set().union(*(defined(path) for path in (ROOT / "tests").rglob("test_*.py")))


@pytest.mark.parametrize("page", PAGES)
def test_no_numbered_statement_is_left_out_or_stands_twice(page: str) -> None:
    named = [one for first, *_ in cells(page) for one in numbers(first)]
    assert sorted(named) == sorted((kind, i) for kind, count in PAGES[page].items() for i in range(1, count + 1))


@pytest.mark.parametrize("page", PAGES)
def test_what_the_tables_cite_exists(page: str) -> None:
    for number, *rest in cells(page):
        assert all(rest), number
        for cited in re.findall(r"`([^`]+)`", " ".join(rest)):
            if match := re.fullmatch(r"([\w/]+\.py)(?:: ([\w.]+))?", cited):
                path = next(p for p in (ROOT / "src" / "fedveil" / match[1], ROOT / match[1]) if p.is_file())
                assert match[2] is None or set(match[2].split(".")) <= defined(path), cited
            elif cited.startswith("test_"):
                assert cited in names_of_tests(), cited
            elif match := re.fullmatch(r"(?:fedveil reproduce )?([\w-]+/[\w-]+)", cited):
                assert match[1] in recipe_names(), cited


@pytest.mark.parametrize("page", PAGES)
def test_examples_on_the_pages_print_what_they_show(page: str) -> None:
    example = doctest.DocTestParser().get_doctest(text_of(page), {}, page, None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(example)
    assert runner.failures == 0
    assert runner.tries > 0 or page not in ("ladp-fl", "fedanc")


def test_ladp_theorem_4_has_no_learning_rate() -> None:
    """mu <= L for every L-smooth function under Polyak-Lojasiewicz, also where it is not convex, so the interval is empty."""
    x = np.linspace(-30, 30, 600_001)[1:]
    value, slope, curve = x**2 + 3 * np.sin(x) ** 2, 2 * x + 3 * np.sin(2 * x), 2 + 6 * np.cos(2 * x)
    away = np.abs(x) > 1e-3
    mu, smooth = (slope[away] ** 2 / (2 * value[away])).min(), np.abs(curve).max()
    assert 0 < mu < smooth
    assert (mu - smooth) / (smooth * 20.0 * mu) < 0


def test_fedanc_theorem_1_is_refuted_by_a_parabola() -> None:
    """The mean squared gradient tends to eta / (2 - eta); ten times the rounds would divide the claimed term by ten."""
    rng, theta, total = np.random.default_rng(0), np.zeros(2000), []
    for _ in range(3000):
        total.append(np.mean(theta**2))
        theta = theta - 0.1 * (theta + rng.standard_normal(2000))
    short, long = np.mean(total[:300]), np.mean(total)
    assert long > short
    assert long == pytest.approx(0.1 / 1.9, rel=0.03)


def test_fedglp_claims_name_their_accountant() -> None:
    path = presets()["fedglp-adp/fashion-mnist"]
    claims = []
    for accountant in ("opacus", "theorem1"):
        statement = certify_config(load_config(path, ["privacy.epsilon=6.0", f"method.accountant={accountant}"]))
        claims.append(next(view.claimed for view in statement.views if view.claimed is not None))
    assert [claim.source for claim in claims] == ["FedGLP-ADP, its Renyi accountant", "FedGLP-ADP, Theorem 1"]
    sigma = fedglp.accountant_noise_multiplier(6, 20, 0.1)
    assert fedglp.claimed_epsilon(sigma, 20, 0.1) == pytest.approx(7.48, abs=0.005)
    assert fedglp.claimed_epsilon(0.3, 40, 0.1) == pytest.approx(267.5, abs=0.05)
    assert fedglp.accountant_epsilon(0.3, 40, 0.1) == pytest.approx(264.1, abs=0.05)


def test_ladp_headlines_are_means_of_its_tables() -> None:
    """Equations 20 to 23: means over the epsilons of each scenario, then the scenarios, then the five baselines."""
    means = []
    for name, gain in (
        ("ladp-fl/table-6", lambda own, other: own / other - 1),
        ("ladp-fl/table-7", lambda own, other: 1 - own / other),
    ):
        by_baseline = []
        for column in range(1, 6):
            rates = [gain(row[0], row[column]) for scenario in load_recipe(name).published for row in scenario]
            assert len(rates) == 16
            by_baseline.append(100 * math.fsum(rates) / 16)
        means.append(by_baseline)
    assert means[0] == pytest.approx([236.32, 144.93, 102.42, 25.18, 6.10], abs=0.006)
    assert sum(means[0]) / 5 == pytest.approx(102.99, abs=0.006)
    assert means[1] == pytest.approx([69.32, 51.35, 1.20, 40.54, 68.31], abs=0.006)
    assert sum(means[1]) / 5 == pytest.approx(46.14, abs=0.006)


def test_fedanc_targets_are_what_equation_10_gives_for_its_controller() -> None:
    """beta = gamma = 0.5 for HARBox's network at either scale: 1,460; a target of 600 would force the noise up."""
    from fedveil.data.catalogue import info
    from fedveil.models.model_registry import build
    from fedveil.papers.fedanc.method import claimed_epsilon
    from fedveil.studies.reproduce.recipe_files import SCALES, job_of

    recipe, data = load_recipe("fedanc/fig-6"), info("harbox")
    row = next(row for row in rows(recipe) if row.labels == ("HARBox", "FedANC"))
    for scale in SCALES:
        config = job_of(recipe, row, scale).config
        weights = sum(p.numel() for p in build("cnn-lstm", data.input_shape, data.classes, 0).parameters())
        assert config.privacy.epsilon == pytest.approx(claimed_epsilon(0.5, 0.5, weights, 1e-5), rel=0.05)


@pytest.mark.parametrize(("tables", "scenario"), [(("table-2", "table-3"), 0), (("table-6", "table-7"), 2)])
def test_rate_rows_of_ladp_are_those_of_the_kept_runs(tables: tuple[str, str], scenario: int) -> None:
    """LaDP-FL's gain over each baseline, the paper's by its numbers and ours by the runs kept of Tables II and III."""
    page = text_of("ladp-fl")
    columns = [
        (gain, load_recipe(f"ladp-fl/{table}").published[scenario][row], kept_table, column, epsilon)
        for table, kept_table, column, gain in (
            (tables[0], "table-2", "accuracy (%)", lambda own, other: 100 * (own / other - 1)),
            (tables[1], "table-3", "noise scale", lambda own, other: 100 * (1 - own / other)),
        )
        for row, epsilon in ((0, "0.2"), (3, "0.5"))
    ]
    names = ("Full DP", "Time-Varying DP", "Sensitive DP", "DPA LDP", "AdapLDP")
    rates: list[list[tuple[float, float]]] = [[], [], [], []]
    for place, name in enumerate(names, 1):
        for (gain, paper, table, column, epsilon), pairs in zip(columns, rates, strict=True):
            (own,), (other,) = (
                kept(f"ladp-fl/{table}", column, method, epsilon, "ResNet-18, CIFAR-10") for method in ("LaDP-FL", name)
            )
            pairs.append((gain(paper[0], paper[place]), gain(own, other)))
        assert _rate_row(name, [pairs[-1] for pairs in rates]) in page
    means = [(math.fsum(p for p, _ in pairs) / 5, math.fsum(o for _, o in pairs) / 5) for pairs in rates]
    assert _rate_row("mean of the five", means) in page
    ours = [o for _, o in means]
    more, less = (ours[0] + ours[1]) / 2, (ours[2] + ours[3]) / 2
    assert f"{more:.1f} % more accuracy, all of it chance, and {less:.0f} %" in " ".join(page.split())


def _rate_row(name: str, cells: list[tuple[float, float]]) -> str:
    return f"| {name} | {' | '.join(f'{paper:.1f} / {ours:.1f}' for paper, ours in cells)} |"


def test_long_tables_say_how_many_rows_they_have_and_which_are_kept() -> None:
    section = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8").split("## Tables that take more than four hours\n")[1]
    listed = re.findall(r"^\| `([\w/-]+)` \| (\d+) \| [\d,]+ \| (\d+) \| \S", section, flags=re.M)
    assert len(listed) > 30
    for name, total, have in listed:
        assert int(total) == sum(not row.missing for row in rows(load_recipe(name))), name
        kept_rows = KEPT.get(name, {}).get("paper", {}).get("rows", [])
        assert int(have) == len({tuple(row["labels"].values()) for row in kept_rows}), name
