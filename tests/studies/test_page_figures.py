"""Numbers in the tables of docs are those of the rows that are kept, to the last digit shown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

import pytest

from fedveil.models.model_registry import build
from fedveil.studies.statistics import paired_t
from kept_rows import ACCURACY, KEPT, LABELS, ON_FASHION, RESULTS, ROOT, kept

TWIN: dict[str, list[float]] = json.loads((RESULTS / "papers.json").read_text(encoding="utf-8"))["twin"]
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")

Samples = list[list[float]]
"""What the numbers of a cell are: for each the kept seeds."""


def accuracy_4_8(sigma: str, i: int) -> Samples:
    """Table 4 on MNIST and CIFAR-10, then Table 8, each at two K."""
    name, m, data = [("4", "50", "MNIST, LeNet-5"), ("4", "50", "CIFAR-10, ResNet-18"), ("8", "20", "")][i // 2]
    wanted = {"sigma": sigma, "m": m, "K": ("50", "200")[i % 2]} | ({"scenario": data} if data else {})
    rows = KEPT[f"noisy-fedavg/table-{name}"]["small"]["rows"]
    return [row["values"]["accuracy (%)"]["ours"] for row in rows if row["labels"] == wanted]


def table_12(m: str, examples: str, scale: str, *, labels: bool = True) -> Samples:
    """The convergent analysis' Table 12, whichever engine a row was run with; by labels of a client, or by one record."""
    rows = [r for r in KEPT["noisy-fedavg/table-12"][scale]["rows"] if (LABELS[0] in r["overrides"]) is labels]
    return [next(row["values"]["sensitivity"]["ours"] for row in rows if row["labels"] == {"m": m, "S": examples})]


def attacks_at_scale(row: str, i: int) -> Samples:
    """The same at the paper's scale."""
    return attacks(row, i, "paper")


def attacks(row: str, i: int, scale: str = "small") -> Samples:
    """Tables 11 and 13 to 16; a row without a table's name goes on with the last one."""
    sigma, (table, t) = ("1.0", "0.1", "0.01", "0")[i], ATTACKS[row]
    columns = {"11": ["targets found (%)"], "13": ["labels reconstructed (%)"], "14": ["L2 distance"]}
    columns |= {"15": ["attribute inferred (%)", "balanced (%)"], "16": ["model (%)"], "16b": ["attacker (%)"]}
    rows = KEPT[f"noisy-fedavg/table-{table[:2]}"][scale]["rows"]
    wanted = [r for r in rows if r["labels"]["sigma"] == sigma and r["labels"].get("T", t) == t]
    return [wanted[0]["values"][column]["ours"] for column in columns[table]] if wanted else []


ATTACKS = {f"T = {t} ({table})": (table, str(t)) for table in ("11", "13", "14", "15") for t in range(100, 1001, 100)} | {
    "Table 11, clients found of 10 (%), T = 200": ("11", "200"),
    "Table 13, labels reconstructed (%), T = 100": ("13", "100"),
    "Table 14, L2 distance (3 images, 150 steps), T = 100": ("14", "100"),
    "Table 15, animal or not (%; ours balanced), T = 100": ("15", "100"),
    "Table 16, the model's accuracy (%)": ("16", ""),
    "Table 16, the model's accuracy after 600 rounds (%)": ("16", ""),
    "Table 16, the extracted model's": ("16b", ""),
}
SCHEDULES = {"constant": "constant", "cyclic": "cyclically", "stage-wise": "stage-wise", "iterative": "iteratively"}
COMPONENTS = {"neither": "neither (DP-FedAvg)", "GLP": "GLP", "GLP and ACNDP": "GLP and ACNDP"}
ALDP = {"ALDP-FL, an iteration is a batch": "ALDP-FL", "ALDP-FL, an iteration is a pass": "ALDP-FL, a pass"}
ALDP |= {"ALDP-FL, an iteration is a batch, and so is d": "ALDP-FL, d a batch", "Fed-DPA (global model)": "Fed-DPA"}
FEDANC = {"none": "None", "static DP, beta = 0.5 on all coordinates": "static DP"}
FEDANC |= {"ours, not the paper's: constants beta = gamma = 0.5": "static sparse DP"} | {
    n: n for n in ("Soteria", "FedANC", "CENSOR")
}
CONTROLLER = ("noise scale beta, last", "spread of beta, first rounds", "share gamma, last", "spread of gamma, first rounds")
CONTROLLER = (*CONTROLLER, "accuracy (%)")
PAPER: dict[str, Any] = {"scale": "paper", "overrides": ON_FASHION}
TWINS = {"m = 20": "base", "cyclic rates": "schedule-cyclic", "stage-wise rates": "schedule-stage-wise"}
TWINS |= {"iterative rates": "schedule-iterative", "Noisy-FedProx, alpha = 1": "alpha-1.0"}


def own_models(recipe: str, method: str, *labels: str) -> Samples:
    return [kept(f"fedglp-adp/{recipe}", ACCURACY, method.removesuffix(" (reconstructed)"), *labels)]


def table_1(method: str, i: int, *epsilons: str) -> Samples:
    """Each seed of a column of FedGLP-ADP's Table 1 at the paper's scale; the columns between are the paper's."""
    labels = ("Fashion-MNIST", method.removesuffix(" (reconstructed)"), epsilons[i // 2])
    return [[seed] for seed in kept("fedglp-adp/table-1", ACCURACY, *labels, scale="paper")] if i % 2 else []


def generated(row: str, i: int) -> Samples:
    epsilon, name = re.fullmatch(r"(.*?)(?:, (epsilon .*))?", row).groups()[::-1]  # type: ignore[union-attr]
    method = f"{epsilon}, {name}" if epsilon else name
    which = ("public 1", "public 2", "private")[min(i // 2, 2)]
    column = "accuracy of the model (%)" if i == 6 else (f"FD-judge, {which}", f"taken for the class (%), {which}")[i % 2]
    return [kept("ladp-fl/table-10", column, method)]


def twin(row: str, i: int) -> Samples:
    name = row.strip("*")
    curve = TWIN[TWINS.get(name, name.removeprefix("Noisy-FedProx, ").replace(" = ", "-"))]
    return [[curve[(1, 10, 50, 100)[i] - 1]]]


def noised_share(row: str, i: int) -> Samples:
    """Per cent of the weights in tensors of norm R or more, at the start of training."""
    name, options = NETWORKS[i]
    tensors = list(build(name, (3, 32, 32), 10, 1, **options).parameters())
    share = 100 * sum(t.numel() for t in tensors if t.norm() >= float(row)) / sum(t.numel() for t in tensors)
    return [[share]] if share else []


NETWORKS: list[tuple[str, dict[str, Any]]] = [("resnet18", {}), ("cnn2", {"channels": (32, 64), "hidden": 512})]
NETWORKS += [("cnn2", {"channels": (8, 16), "hidden": 64})]


def thresholds(row: str, i: int) -> Samples:
    """LaDP-FL at small scale, by R: accuracy, then noise."""
    r, where = row.partition(",")[0], {"scenario": "ResNet-18, CIFAR-10", "epsilon": "0.5"}
    method = {"no noise": "no protection", "Full DP": "Full DP"}.get(r, "LaDP-FL")
    overrides = [f"method.threshold={r}"] if r in ("1", "2", "3", "5") else []
    table, column = (("table-2", "accuracy (%)"), ("table-3", "noise scale"))[i]
    return [kept(f"ladp-fl/{table}", column, method, *where.values(), overrides=overrides)]


def sensitivities(row: str, i: int) -> Samples:
    """Fig. 2: mean and spread, the mean in units of m = 20's, and p against it."""
    own, base = (
        kept("noisy-fedavg/fig-2", "sensitivity", name.partition(", K")[0], overrides=LABELS) for name in (row, "m = 20")
    )
    if i == 0 or own == base:
        return [own] if i == 0 else []
    p = paired_t([x - y for x, y in zip(own, base, strict=True)])
    return [[], [[fmean(own) / fmean(base)]], [[p]], []][i]


GRIDS: dict[tuple[str, str, int], Callable[[str, int], Samples]] = {
    ("papers/convergent-dp", "| sigma | MNIST, K = 50 |", 18): accuracy_4_8,
    ("papers/convergent-dp", "| | T = 100 | 200 |", 24): lambda row, i: [
        kept("noisy-fedavg/table-9", f"T = {100 * (i + 1)}", SCHEDULES[row], scale="paper", overrides=LABELS)
    ],
    ("papers/convergent-dp", "| | accuracy (%), paper | ours |", 8): lambda row, i: (
        [
            kept(
                "noisy-fedavg/table-5",
                ("accuracy (%)", "sensitivity")[i // 2],
                row.replace("= ", ""),
                scale="paper",
                overrides=["model.name=lenet5", *LABELS],
            )
        ]
        if i % 2
        else []
    ),
    ("papers/convergent-dp", "| setting, at the paper's scale |", 7): lambda row, i: (
        [kept("noisy-fedavg/fig-2", "sensitivity", row, scale="paper", overrides=["model.name=lenet5", *LABELS])]
        if i == 0 and "," not in row
        else []
    ),
    ("papers/convergent-dp", "| Fig. 2 at small scale |", 42): sensitivities,
    ("papers/convergent-dp", "| Table 5 at small scale |", 16): lambda row, i: (
        [kept("noisy-fedavg/table-5", ("accuracy (%)", "sensitivity")[i // 2], row.replace("= ", ""), overrides=LABELS)]
        if i % 2
        else []
    ),
    ("papers/convergent-dp", "| clients | 100 examples each |", 6): lambda row, i: table_12(row, ("100", "500")[i], "small"),
    ("papers/convergent-dp", "| clients, one record |", 6): lambda row, i: table_12(
        row, ("100", "500")[i], "small", labels=False
    ),
    ("papers/convergent-dp", "| clients, the paper's scale |", 15): lambda row, i: table_12(row, f"{100 * (i + 1)}", "paper"),
    ("papers/convergent-dp", "| Table 7, the paper / ours |", 20): lambda row, i: [
        kept("noisy-fedavg/table-7", f"T = {200 * (i + 1)}", row.split(";")[0], overrides=LABELS)
    ],
    ("papers/convergent-dp", "| | sigma 1 | 0.1 | 0.01 | 0 |", 38): attacks,
    ("papers/convergent-dp", "| at the paper's scale | sigma 1 | 0.1 | 0.01 | 0 |", 71): attacks_at_scale,
    ("papers/fedglp-adp", "| at this scale, between | paper, epsilon 4 |", 45): lambda row, i: table_1(row, i, "4", "6", "8"),
    ("papers/fedglp-adp", "| method | paper, epsilon 2 | ours | paper, epsilon 16 |", 30): lambda row, i: table_1(
        row, i, "2", "16"
    ),
    ("papers/fedglp-adp", "| method | paper, epsilon 2 | ours (small) |", 10): lambda row, i: (
        own_models("table-1", row, ("2", "16")[i // 2]) if i % 2 and row != "FedAvg, no noise: its global model" else []
    ),
    ("papers/fedglp-adp", "| method | alpha 0.1: paper |", 20): lambda row, i: (
        [] if i % 2 == 0 else own_models("fig-3", row) if i == 7 else own_models("table-2", row, ("0.1", "100", "iid")[i // 2])
    ),
    ("papers/fedglp-adp", "| Table 5, all at the same sigma |", 6): lambda row, i: (
        [kept("fedglp-adp/table-5", ACCURACY, COMPONENTS[row.split(":")[0]], ("2", "16")[i // 2], overrides=ON_FASHION)]
        if i % 2 and not row.startswith("FedAvg")
        else []
    ),
    ("papers/fedglp-adp", "| Table 3 | epsilon 2: paper |", 6): lambda row, i: (
        [
            kept(
                "fedglp-adp/table-3",
                ACCURACY,
                "fixed" if "fixed" in row else "dynamic",
                ("2", "4", "16")[i // 2],
                overrides=ON_FASHION,
            )
        ]
        if i % 2
        else []
    ),
    ("papers/fedglp-adp", "| Table 4, epsilon 16 |", 5): lambda row, i: (
        [kept("fedglp-adp/table-4", ACCURACY, ("0", "0.2", "0.4", "0.8", "1.6")[i], overrides=ON_FASHION)]
        if row == "ours"
        else []
    ),
    ("papers/ladp-fl", "| method | I: accuracy |", 50): lambda row, i: [
        kept(
            "ladp-fl/table-5",
            ("accuracy (%)", "noise scale")[i % 2],
            ("I", "II")[i // 2],
            ", ".join(reversed(row.split(", "))),
        )
    ],
    ("papers/ladp-fl", "| | car | taken for it |", 91): lambda row, i: (
        [] if row.startswith(("floor", "real")) else generated(row, i)
    ),
    ("papers/aldp-fl", "| accuracy, F1 | MNIST |", 28): lambda row, i: [
        kept("aldp-fl/table-4", of, ALDP.get(row, row), ("MNIST, LeNet-5", "Fashion-MNIST, LeNet-5")[i], scale="paper")
        for of in ("accuracy", "F1")
    ],
    ("papers/aldp-fl", "| small scale | MNIST |", 42): lambda row, i: [
        [
            100 * x
            for x in kept(
                "aldp-fl/table-4", "accuracy", ALDP.get(row, row), f"{('MNIST', 'Fashion-MNIST', 'CIFAR-10')[i]}, LeNet-5"
            )
        ]
    ],
    ("papers/aldp-fl", "| MSE, SSIM | MNIST |", 30): lambda row, i: (
        []
        if row.endswith("the paper")
        else [kept("aldp-fl/table-5", of, row, ("MNIST", "FashionMNIST", "CIFAR-10")[i]) for of in ("MSE", "SSIM")]
    ),
    ("papers/fedanc", "| arm | accuracy, last round (%) |", 24): lambda row, i: [
        kept("fedanc/fig-6", ("accuracy (%)", "training loss")[i], FEDANC[row.partition(" (")[0]])
    ],
    ("papers/fedanc", "| | beta, last |", 20): lambda row, i: [kept("fedanc/fig-3", CONTROLLER[i], row)],
    ("papers/fedanc", "| full scale | beta, last |", 10): lambda row, i: [
        kept("fedanc/fig-3", CONTROLLER[i], row, scale="paper")
    ],
    ("papers/fedanc", "| lambda | target 600 |", 14): lambda row, i: [
        kept("fedanc/fig-5", "accuracy (%)", f"lambda = {row.partition(' ')[0]}", overrides=[[], ["privacy.epsilon=300"]][i])
    ],
    ("papers/fedanc", "| N, 10 clients per round, target 600 |", 6): lambda row, i: (
        [kept("fedanc/fig-5", "accuracy (%)", f"N = {row}")] if i == 0 else []
    ),
    ("papers/fedanc", "| entries sent |", 16): lambda row, i: [
        kept("fedanc/fig-4", of, row, ("sees what was sent", "naive")[i], scale="paper") for of in ("PSNR (dB)", "SSIM")
    ],
    ("papers/ladp-fl", "| R | ResNet-18 (11,173,962 weights)", 15): noised_share,
    ("papers/ladp-fl", "| R, small scale | accuracy (%) |", 13): thresholds,
    ("papers/fedanc", "| data, defence | DLG: paper |", 48): lambda row, i: (
        [kept("fedanc/table-1", of, *row.split(", "), ("DLG", "IG", "GI")[i // 2]) for of in ("PSNR (dB)", "SSIM")]
        if i % 2
        else []
    ),
    ("papers/fedanc", "| Fashion-MNIST, LeNet-5 | DLG: paper |", 24): lambda row, i: (
        [
            kept("fedanc/table-1", of, "Fashion-MNIST", row, ("DLG", "IG", "GI")[i // 2], scale="paper")
            for of in ("PSNR (dB)", "SSIM")
        ]
        if i % 2
        else []
    ),
    ("papers/fedglp-adp", "| Table 3 | epsilon 2 | 4 | 16 |", 6): lambda row, i: [
        kept("fedglp-adp/table-3", ACCURACY, "fixed" if "fixed" in row else "dynamic", ("2", "4", "16")[i], **PAPER)
    ],
    ("papers/fedglp-adp", "| Table 4, at this scale |", 5): lambda row, i: [
        kept("fedglp-adp/table-4", ACCURACY, ("0", "0.2", "0.4", "0.8", "1.6")[i], **PAPER)
    ],
    ("papers/fedglp-adp", "| Table 5 | epsilon 2 | 4 |", 15): lambda row, i: [
        kept("fedglp-adp/table-5", ACCURACY, COMPONENTS[row.split(":")[0]], ("2", "4", "6", "8", "16")[i], **PAPER)
    ],
    ("methods/noisy-fedavg", "| setting | after 1 | 10 |", 60): twin,
}
"""By page, beginning of the header and numbers held: the samples of the cell in column i (from 0) of a row."""


def table(page: str, header: str) -> list[list[str]]:
    """The cells of the rows below a header that is on the page once; a row `T = 500` gets the number of its table."""
    lines = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.startswith(header)]
    body, above = [], ""
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        above = found[1] if (found := re.match(r"Table (\d+),", cells[0])) else above
        body.append([f"{cells[0]} ({above})" if re.fullmatch(r"T = \d+", cells[0]) else cells[0], *cells[1:]])
    return body


def holds(text: str, value: float) -> bool:
    """Whether a printed number is the value, rounded to its digits."""
    digits = len(text.partition(".")[2])
    return abs(float(text.replace(",", "")) - value) <= 0.5 * 10**-digits * (1 + 1e-6)


def expected(sample: list[float], cell: str, *, percent: bool) -> list[float]:
    """The numbers of a cell for one sample: mean and spread, or one number."""
    values = [100 * x if percent else x for x in sample]
    return [fmean(values), stdev(values)] if "±" in cell else [fmean(values)]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid[0]}: {grid[1].strip('| ')}")
def test_a_table_shows_what_is_kept(grid: tuple[str, str, int]) -> None:
    page, header, least = grid
    held = 0
    for name, *cells in table(page, header):
        for i, cell in enumerate(cells):
            samples = [sample for sample in GRIDS[grid](name, i) if sample] if cell else []
            ours = cell.rpartition(" / ")[2]
            shown, percents = NUMBER.findall(ours), [part.endswith("%") for part in ours.split(", ")]
            wanted = [
                value
                for sample, percent in zip(samples, [*percents, False], strict=False)
                for value in expected(sample, ours, percent=percent and max(sample) <= 1 and page == "papers/aldp-fl")
            ]
            if wanted:
                assert len(shown) == len(wanted), f"{name}, column {i + 1}: {cell}"
                assert all(map(holds, shown, wanted)), f"{name}, column {i + 1}: {cell} beside {wanted}"
                held += len(wanted)
    assert held >= least


@pytest.mark.parametrize(
    ("text", "value", "right"), [("22.6", 22.5478, False), ("22.5", 22.5478, True), ("1,160", 1160.47, True)]
)
def test_a_number_is_held_to_its_last_digit(text: str, value: float, right: bool) -> None:
    assert holds(text, value) is right
