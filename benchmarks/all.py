"""Everything that docs/performance.md says about speed and memory, by one command.

    python benchmarks/peers/install.py      # once: opacus and the other libraries, each in its own environment
    python benchmarks/all.py                # about 45 minutes on two idle cores; then writes the tables of the page
    python benchmarks/all.py --only engine methods
    python benchmarks/all.py --page         # only writes the tables again, from benchmarks/results/

Ratios are of the fastest of several rounds that took turns (`first_round`: of medians). Where another program wanted a core when
the measurement began, they are of the cores' work instead, marked w, and seconds are left out (`whole_run`: marked below it).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from harness import HERE, arguments, markdown, put
from sides import loaded

IDLE = 0.5
"""Load average up to which seconds are shown."""
PARTS = {
    "engine": ["run.py"],
    "whole_run": ["whole_run.py"],
    "large": ["large.py"],
    "methods": ["methods_overhead.py", "--workloads", "W1", "W3"],
    "per_example": ["per_example.py"],
    "single_examples": ["single_examples.py"],
    "scale": ["scale.py"],
    "first_round": ["first_round.py"],
    "peers": ["peers/compare.py", "--workloads", "W0", "W1", "W2", "W3"],
}
Held = dict[str, Any]


def idle(held: Held, key: str) -> bool:
    """Whether this entry was measured on an idle machine."""
    load = held["load"].get(key)
    return load is None or load <= IDLE


def cell(held: Held, key: str, side: Held) -> str:
    """Ratio of the fastest rounds; where the machine was busy that of the cores' work, marked so."""
    work = side.get("work_ratio")
    return f"{side['ratio']:.2f}" if idle(held, key) or not work else f"{work:.2f} w"


def least(values: Sequence[float]) -> str:
    """The fastest, in seconds."""
    return f"{min(values):.4f}" if min(values) < 0.1 else f"{min(values):.3f}"


# --- tables ------------------------------------------------------------------------------------------------------------


def engine(held: Held) -> str:
    """Pool, and `stacked` where it was measured, beside the limit."""
    rows = []
    for name, sides in held["table"].items():
        for engine in [side for side in ("pool", "stacked") if side in sides]:
            shown = [least(sides[side]["seconds"]) if idle(held, name) else "busy" for side in (engine, "limit")]
            rows.append([name, engine, cell(held, name, sides[engine]), *shown, f"{len(sides[engine]['seconds'])}"])
    return markdown(["workload", "engine", "/ limit", "its round, s", "limit, s", "rounds"], rows)


def whole_run(held: Held) -> str:
    """Rounds of runs that charge and save, in milliseconds, also where the machine was busy: `busy` says so below."""
    rows = []
    for key, entry in held["table"].items():
        least, median = (1e3 * of(entry["seconds"]) for of in (min, statistics.median))
        each = [f"{value / entry['clients']:.2f}" for value in (least, median)]
        rows.append([*key.split(), f"{least:,.1f}", f"{median:,.1f}", *each, f"{len(entry['seconds'])}"])
    return markdown(["workload", "view", "engine", "least, ms", "median, ms", "least a client, ms", "median", "rounds"], rows)


def large(held: Held) -> str:
    """Whole runs of large models beside the limit, and where the seconds of their fastest round go."""
    named = ("clients", "noise", "server step", "checkpoint")
    rows = []
    for key, entry in held["table"].items():
        workload, view = key.split()
        memory = ", ".join(f"{n}: {mb:,.0f}" for n, mb in entry["memory_by_clients_mb"].items())
        ratio, shares = "not measured", [""] * len(named)
        if "ratio" in entry:
            spent = entry["phases"]
            ratio = f"{entry['ratio']:.2f}" if idle(held, key) else f"{entry['work_ratio']:.2f} w"
            shares = [f"{100 * spent.get(phase, 0.0) / sum(spent.values()):.0f} %" for phase in named]
        rows.append([workload, view, ratio, *shares, memory, f"{len(entry.get('seconds', ()))}"])
    head = ["workload", "view", "run / limit", "clients", "noise", "server step", "waiting for the checkpoint"]
    return markdown([*head, "MB by clients a round", "rounds"], rows)


def methods(held: Held) -> str:
    """Each method beside DP-FedAvg in its view."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for key, sides in held["table"].items():
        workload, view = key.split()
        for name, side in sides.items():
            if name != "dp-fedavg":
                cells.setdefault((name, view), {})[workload] = cell(held, key, side)
    workloads = list(dict.fromkeys(key.split()[0] for key in held["table"]))
    rows = [[*names, *(found.get(w, "") for w in workloads)] for names, found in cells.items()]
    return markdown(["method", "view", *workloads], rows)


def per_example(held: Held, head: str = "step at batch 32, / plain") -> str:
    """DP-SGD steps beside plain ones."""
    sides = list(dict.fromkeys(name for network in held["table"].values() for name in network))
    rows = [
        [name, *(cell(held, key, network[name]) if name in network else "" for key, network in held["table"].items())]
        for name in sides
    ]
    return markdown([head, *held["table"]], rows)


def single_examples(held: Held) -> str:
    """Steps with gradients of single examples by other ways beside that of networks of a user's own."""
    return per_example(held, "step of DP-SGD, / one call each")


def scale(held: Held) -> str:
    """Rounds and memory against the number of clients."""
    measured = list(held["table"].values())
    first, rows = measured[0]["round_seconds_least"], []
    for row in measured:
        fastest, quiet = row["round_seconds_least"], idle(held, str(row["clients"]))
        seconds = [f"{fastest:.3f}", f"{row['total_seconds']:.1f}"] if quiet else ["busy"] * 2
        rows.append([f"{row['clients']:,}", f"{fastest / first:.2f}", *seconds, f"{row['rss_mb']:,}"])
    relative = f"fastest round / that of {measured[0]['clients']}"
    return markdown(["clients", relative, "fastest round, s", "whole run, s", "largest resident size, MB"], rows)


def first_round(held: Held) -> str:
    """Commands beside `import torch`: medians, since a user starts a command once."""
    seconds = {name: entry["seconds"] for name, entry in held["table"].items()}
    torch, rows = statistics.median(seconds["import torch"]), []
    for name, each in seconds.items():
        shown = [f"{s:.2f}" if idle(held, name) else "busy" for s in (statistics.median(each), min(each))]
        rows.append([name, f"{statistics.median(each) / torch:.2f}", *shown])
    return markdown(["command", "/ import torch", "median, s", "fastest, s"], rows)


def peers(held: Held) -> str:
    """Other libraries beside ours."""
    found = {tuple(key.split()): sides for key, sides in held["table"].items()}
    workloads, names = (list(dict.fromkeys(part)) for part in zip(*found, strict=True))
    rows = [[n, *(cell(held, f"{w} {n}", found[w, n][n]) if (w, n) in found else "" for w in workloads)] for n in names]
    return markdown(["library", *(f"{w}: its round / ours" for w in workloads)], rows)


TABLES: dict[str, Callable[[Held], str]] = {
    table.__name__: table
    for table in (engine, whole_run, large, methods, per_example, single_examples, scale, first_round, peers)
}


def busy(held: Held) -> str:
    """How busy the machine was."""
    loads = [load for key in held["table"] if not idle(held, key) and (load := held["load"][key]) is not None]
    if not loads:
        return ""
    many = f"{min(loads):.0f} to {max(loads):.0f}" if round(min(loads)) < round(max(loads)) else f"{max(loads):.0f}"
    return f"\n\nMeasured on a busy machine, while {many} other processes wanted its cores."


def main() -> None:
    """Measure, then write each table between its marks."""
    asked, failed = arguments(__doc__, only=PARTS, page=False), []
    for name in [] if asked.page else asked.only:
        script, *given = PARTS[name]
        print(f"--- {name}", flush=True)
        if subprocess.run([sys.executable, str(HERE / script), *given]).returncode:
            failed.append(name)
    for name, table in TABLES.items():
        held = loaded(name)
        if held["table"]:
            put("performance.md", f"<!-- table: {name} -->", table(held) + busy(held), "<!-- end of table -->")
            print(f"\n{name}\n{table(held)}{busy(held)}")
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
