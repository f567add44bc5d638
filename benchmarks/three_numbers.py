"""Claimed, proven and audited epsilon of every method in the registry, in one small setting; writes the table and the figure.

    python benchmarks/three_numbers.py                 # all rows: results, page and figure; what is measured already stays
    python benchmarks/three_numbers.py fedanc          # the rows of one method, or one row by its name
    python benchmarks/three_numbers.py --again fedanc  # forget what was measured of them before
    python benchmarks/three_numbers.py --draw          # page and figure from the results

8 clients, 4 a round, 5 rounds, 3 local steps, delta 1e-3, target epsilon 2; layouts shrunk to about 400 coordinates. Rows of
DP-SGD and of the last model alone have the settings that their names tell (`special`). Each row is audited with five seeds,
unless the first finds a structural leak, which no seed changes. It can be interrupted: each audit is kept when it is done.
"""

from __future__ import annotations

import json
import math
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from fedveil.accounting.types import at_least, at_most
from fedveil.attacks.audit_run import audit_config
from fedveil.drawing import AMBER, BLUE, MUTED, RED, blank, save
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config, parse
from fedveil.experiment.run_directory import plain
from fedveil.methods.method_registry import METHODS
from harness import FIGURES, arguments, keep, kept, markdown, put

COMMAND = "python benchmarks/three_numbers.py"
N, SEEDS = 300, (1001, 1002, 1003, 1004, 1005)
TRAINING = {
    "rounds": 5,
    "clients_per_round": 4,
    "batch_size": 16,
    "batch_clip": 1.0,
    "local_steps": 3,
    "sampling": "fixed",
    "optimizer": {"name": "sgd", "lr": 0.1},
}
RECORD = {"unit": "record", "adjacency": "replace_one"}
EXAMPLES = {"local": "dp-sgd", "batch_size": 64, "local_steps": 1, "example_clip": 1.0}
CLAIMED: dict[str, dict[str, str]] = {
    "fedglp-adp": {},
    "blur-lus": {},
    "fed-dpa": {},
    "fed-smp": {},
    "fed-addp": {"adjacency": "replace_one"},
    "ladp-fl": {"unit": "record"},
}
"""What published variants speak of, where it is not a replaced record; of LaDP-FL, one deleted or replicated."""
Row = dict[str, Any]
"""What differs from the small setting: method, and sections; `name` where the method's own does not tell."""


def special() -> list[Row]:
    """DP-SGD at record level, and the final view: Theorems 3 (a) and 4 of Noisy-FedAvg, and the bound on the last model."""
    found: list[Row] = [
        {
            "name": "dp-sgd (batch 64 of 180 records, 1 step in each of 10 rounds)",
            "method": {"name": "dp-fedavg"},
            "training": {**EXAMPLES, "rounds": 10},
            "privacy": {"unit": "record", "delta": 5e-4, "view": view},
        }
        for view in ("server", "aggregate")
    ]
    found.append(
        {
            "name": "dpa-ldp (proven, by sample)",
            "method": {"name": "dpa-ldp", "contraction": 0.5},
            "training": EXAMPLES,
            "privacy": {"unit": "record", "delta": 5e-4, "view": "server"},
        }
    )
    final = {"view": "final", "adjacency": "replace_one", "delta": 1e-5, "epsilon": None}
    theorem = {"rounds": 50, "clients_per_round": 20, "local_steps": 5, "batch_clip": 10.0}
    slow = {"name": "sgd", "lr": 0.01}
    twenty = {"data": {"partition": {"kind": "iid", "clients": 20}}, "training": {**theorem, "optimizer": slow}, "privacy": final}
    published = {"variant": "published", "sigma": 0.5, "smoothness": 10.0}
    return [
        *found,
        {"name": "noisy-fedavg (published, Theorem 3a, T = 50)", "method": {"name": "noisy-fedavg", **published}, **twenty},
        {
            "name": "noisy-fedprox (published, Theorem 4, T = 50)",
            "method": {"name": "noisy-fedprox", **published, "proximal": 20.0},
            **twenty,
        },
        {
            "name": "noisy-fedavg (proven, ball of diameter 0.2, T = 20)",
            "method": {"name": "noisy-fedavg", "project_to": 0.2, "assumed_smoothness": 0.1},
            "training": {"rounds": 20},
            "privacy": {"view": "final"},
        },
    ]


def configuration(row: Row, seed: int) -> Config:
    """The small setting with what the row changes."""
    noise = {} if row["method"]["name"] == "fedavg" else {"epsilon": 2.0}
    privacy = {"delta": 1e-3, **noise, **row["privacy"]}
    return parse(
        {
            "data": row.get("data", {"partition": {"kind": "iid", "clients": 8}}),
            "model": {"name": "linear"},
            "method": row["method"],
            "training": {**TRAINING, **row.get("training", {})},
            "privacy": {key: value for key, value in privacy.items() if value is not None},
            "run": {"seed": seed},
        }
    )


def rows() -> list[Row]:
    """Every method and variant, in both views where they exist; published variants in the view of their uploads."""
    found: list[Row] = []
    for name, kind in METHODS.items():
        if name == "adap-dp-fl":
            found += by_record(name)
            continue
        if "variant" in kind.model_fields and not name.startswith("noisy"):
            privacy = {"view": "server"} | CLAIMED.get(name, RECORD)
            found.append({"method": {"name": name, "variant": "published"}, "privacy": privacy})
            if name == "ladp-fl":
                found.append({"method": {**found[-1]["method"], "threshold": 0.3}, "privacy": privacy})
        method = {"name": name, **({"separation": 2} if "separation" in kind.model_fields else {})}
        found += [{"method": method, "privacy": {"view": view}} for view in ("server", "aggregate")]
    return found + special()


def by_record(name: str) -> list[Row]:
    """A method that adapts DP-SGD inside the clients."""
    more = {"training": EXAMPLES, "privacy": {"unit": "record", "delta": 5e-4}}
    kinds = [("published", "server"), ("proven", "server"), ("proven", "aggregate")]
    return [
        {"method": {"name": name, "variant": variant}, **more, "privacy": {**more["privacy"], "view": view}}
        for variant, view in kinds
    ]


def measure(row: Row, seed: int) -> list[dict[str, Any]]:
    """One line for each view that has an audit."""
    import torch

    torch.set_num_threads(1)
    try:
        statement = audit_config(configuration(row, seed), n=N)
    except ConfigError as problem:
        return [{**row, "error": str(problem)}]
    lines = []
    for view in statement.views:
        if not view.audits:
            continue
        best = max(view.audits, key=lambda audit: audit.epsilon)
        claim = view.claimed
        proven = view.proven
        lines.append(
            {
                **row,
                "view": str(view.view),
                "unit": str(best.scope.unit),
                "adjacency": str(best.scope.adjacency),
                "delta": best.delta,
                "claimed": None if claim is None else claim.epsilon,
                "claimed_delta": None if claim is None else claim.delta,
                "claimed_scope": None if claim is None else str(claim.scope),
                "proven": proven.epsilon,
                "audited": {str(seed): best.epsilon},
                "test": best.test,
                "n": best.n,
                "confidence": best.confidence,
                "notes": [str(audit) + "; " + audit.note for audit in view.audits],
            }
        )
    return lines


def label(line: dict[str, Any]) -> str:
    """The row's name."""
    if "name" in line:
        return str(line["name"])
    method = line["method"]
    extra = f", R = {method['threshold']}" if "threshold" in method else ""
    kind = f" ({method.get('variant', 'proven')}{extra})" if "variant" in METHODS[method["name"]].model_fields else ""
    return f"{method['name']}{kind}"


def number(value: float | None) -> str:
    """To the nearest in three digits, or a dash."""
    return "-" if value is None else "inf" if math.isinf(value) else f"{value:.3g}"


def audited(line: dict[str, Any]) -> str:
    """Mean and standard deviation over the seeds, and how many; a single value as it is."""
    values = list(line["audited"].values())
    if len(values) == 1:
        return at_least(values[0], 3)
    if math.inf in values:
        return f"inf in {values.count(math.inf)} of {len(values)}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} ({len(values)})"


def table(lines: list[dict[str, Any]]) -> str:
    """The Markdown table."""
    head = ["method", "view", "unit", "adjacency", "delta", "claimed", "proven", "audited", "test", "n", "confidence"]
    rows = []
    for line in lines:
        claimed = number(line["claimed"])
        if line["claimed"] is not None and line["claimed_delta"] != line["delta"]:
            claimed += f" (delta {line['claimed_delta']:.2g})"
        first = [label(line), line["view"], line["unit"], line["adjacency"], f"{line['delta']:g}", claimed]
        confidence = f"{math.floor(line['confidence'] * 1e6 + 1e-3) / 1e6:g}"
        rows.append([*first, at_most(line["proven"], 3), audited(line), line["test"], line["n"], confidence])
    return markdown(head, rows)


DRAWN = {
    "fedavg": "server",
    "dp-fedavg": "aggregate",
    "fedglp-adp (published)": "aggregate",
    "fedglp-adp (proven)": "aggregate",
    "fedanc (published)": "server",
    "fedanc (proven)": "server",
    "ladp-fl (published)": "server",
    "ladp-fl (proven)": "server",
    "noisy-fedavg (published, Theorem 3a, T = 50)": "final",
    "noisy-fedavg (proven, ball of diameter 0.2, T = 20)": "final",
    "aldp-fl (published)": "server",
    "aldp-fl (proven)": "server",
}
"""The rows of the figure: two baselines, and each of the five papers as published and as proven, in the view of its claim."""


def mean_audit(line: dict[str, Any]) -> float:
    """The mean of the audits of all seeds."""
    return statistics.mean(line["audited"].values())


def refuted(line: dict[str, Any]) -> bool:
    """Return whether the mean audit exceeds the claim."""
    return line["claimed"] is not None and mean_audit(line) > line["claimed"]


def message(lines: list[dict[str, Any]]) -> str:
    """The title of the figure: how many published forms are refuted, and how many audits exceed a proof."""
    published = [line for line in lines if "(published" in label(line)]
    above = sum(mean_audit(line) > line["proven"] for line in lines)
    proofs = "no audit exceeds a proof" if not above else f"{above} audits exceed a proof"
    return f"Audits exceed the claims of {sum(map(refuted, published))} of {len(published)} papers; {proofs}"


def draw(lines: list[dict[str, Any]]) -> None:
    """Draw claimed, proven and audited epsilon of the rows in `DRAWN` on a log axis; infinity is at its right edge."""
    low, edge = 0.05, 1000.0
    drawn = [line for name, view in DRAWN.items() for line in lines if (label(line), line["view"]) == (name, view)]
    figure = blank(8, 0.34 * len(drawn) + 1.5)
    axis = figure.subplots()
    for place, line in enumerate(drawn):
        seeds = [min(max(value, low), edge) for value in line["audited"].values()]
        mean, colour = min(max(mean_audit(line), low), edge), RED if refuted(line) else MUTED
        axis.plot([min(seeds), max(seeds)], [place, place], color=colour, linewidth=1.5, zorder=2)
        axis.scatter(min(line["proven"], edge), place, s=190, marker="|", linewidths=2.5, color=BLUE, zorder=3)
        axis.scatter(mean, place, s=52, marker=">", color=colour, zorder=4)
        if line["claimed"] is not None:
            axis.scatter(line["claimed"], place, s=46, marker="D", color=AMBER, zorder=3)
    marks = {
        "claimed": (AMBER, "D"),
        "proven (upper bound)": (BLUE, "|"),
        "audited (lower bound)": (MUTED, ">"),
        "audited, above the claim": (RED, ">"),
    }
    for name, (colour, mark) in marks.items():
        axis.scatter(
            [], [], color=colour, marker=mark, s=130 if mark == "|" else 46, linewidths=2.5 if mark == "|" else 1, label=name
        )
    axis.set_xscale("log")
    axis.set_xlim(low * 0.8, edge * 1.5)
    axis.xaxis.tick_top()
    axis.xaxis.set_label_position("top")
    axis.set_xticks([low, 0.2, 1, 10, 100, edge], ["≤ 0.05", "0.2", "1", "10", "100", "no bound"])
    axis.set_xlabel("epsilon; audited: mean and range of five seeds", fontsize=9)
    axis.set_yticks(range(len(drawn)), [f"{label(line)}, {line['view']}" for line in drawn], fontsize=9)
    axis.set_ylim(len(drawn) - 0.4, -0.6)
    axis.spines[["bottom", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.25)
    figure.suptitle(message(drawn), x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save(figure, FIGURES / "three-numbers.svg")


def complete(lines: list[dict[str, Any]], seed: int) -> bool:
    """Whether the row needs no audit with this seed."""
    return bool(lines) and all("error" in line or str(seed) in line["audited"] or structural(line) for line in lines)


def structural(line: dict[str, Any]) -> bool:
    """Whether the row has been audited and leaks whatever the seed."""
    return "structural" in line["test"] and set(line["audited"].values()) == {math.inf}


def joined(before: list[dict[str, Any]], lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a row with the values of one more seed; the words are those of the first.

    What an earlier version measured with seed 0 alone goes as soon as there is another.
    """
    if not before or "error" in lines[0] or set(before[0]["audited"]) == {"0"}:
        return lines
    return [{**old, "audited": {**old["audited"], **new["audited"]}} for old, new in zip(before, lines, strict=True)]


def key(row: Row) -> str:
    """What identifies a row among the results."""
    return json.dumps([row.get("name"), row["method"], row["privacy"]], sort_keys=True)


def number_line(line: dict[str, Any]) -> dict[str, Any]:
    """A stored line with its infinities as numbers again."""
    found = {k: math.inf if v == "inf" else v for k, v in line.items()}
    if "audited" in found:
        found["audited"] = {seed: math.inf if v == "inf" else v for seed, v in line["audited"].items()}
    return found


def main() -> None:
    """Measure what is missing of all rows, or of those of the methods or rows named, and write results, page and figure."""
    every = {name for row in rows() for name in (row["method"]["name"], row.get("name")) if name}
    asked = arguments(__doc__, sorted(every), again=False, draw=False)
    wanted = [row for row in rows() if {row["method"]["name"], row.get("name")} & set(asked.names)]
    found: dict[str, list[dict[str, Any]]] = {key(row): [] for row in rows()}
    for line in map(number_line, kept("three_numbers", [])):
        if key(line) in found and not (asked.again and key(line) in {key(row) for row in wanted}):
            found[key(line)].append(line)
    with ProcessPoolExecutor(2) as pool:
        for seeds in () if asked.draw else (SEEDS[:1], SEEDS[1:]):
            missing = [(row, seed) for seed in seeds for row in wanted if not complete(found[key(row)], seed)]
            begun = {pool.submit(measure, row, seed): key(row) for row, seed in missing}
            for done in as_completed(begun):
                found[begun[done]] = joined(found[begun[done]], done.result())
                keep("three_numbers", plain([line for lines in found.values() for line in lines]))
    results = [line for lines in found.values() for line in lines]
    for line in results:
        if "error" in line:
            print(f"not audited: {line['method']} {line['privacy']}: {line['error']}")
    lines = [line for line in results if "error" not in line]
    print(table(lines))
    put("claimed-proven-audited.md", f"<!-- table: {COMMAND} -->", table(lines), "<!-- end of table -->")
    draw(lines)


if __name__ == "__main__":
    main()
