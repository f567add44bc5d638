"""What the benchmarks share: arguments, cases whose results are kept, runs inline, tables and pages.

A benchmark declares its cases, each by the names under which its result is kept, and `fill` does those that are missing; a
benchmark that was broken off goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fedveil.executors.inline import Inline
from fedveil.experiment.assembly import Prepared, federation, prepare
from fedveil.experiment.config import Config
from fedveil.experiment.resolve import data_spec, resolve
from fedveil.federation.fit import fit
from fedveil.federation.progress import Federation, Progress, start
from fedveil.ledger.ledger import Ledger

HERE = Path(__file__).resolve().parent
ROOT, RESULTS = HERE.parent, HERE / "results"
FIGURES = ROOT / "docs" / "figures"
Case = tuple[Any, ...]
"""A function and its arguments."""


def arguments(doc: str | None, names: Collection[str] = (), **options: Any) -> argparse.Namespace:
    """The command line.

    Args:
        doc: the help. names: what may be named, all of them by default. options: `--name` by default value: False for a flag, a
            type for no value, a list for several values, a mapping for several of its keys, all of them by default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if names:
        parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all by default")
    for name, default in options.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, type):
            parser.add_argument(flag, type=default)
        elif isinstance(default, Mapping):
            parser.add_argument(flag, nargs="+", choices=list(default), default=list(default))
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="+", type=type(default[0]) if default else str, default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    asked = parser.parse_args()
    if names:
        if unknown := set(asked.names) - set(names):
            parser.error(f"no {', '.join(sorted(unknown))}: choose from {', '.join(names)}")
        asked.names = asked.names or list(names)
    return asked


def run_parts(doc: str | None, parts: Mapping[str, Callable[[], object]]) -> None:
    """Do the parts that the command line names, or all, on one thread."""
    names = arguments(doc, parts).names
    torch.set_num_threads(1)
    for name in names:
        parts[name]()


# --- results ------------------------------------------------------------------------------------------------------------


def kept(path: Path | str, empty: Any = None) -> Any:
    """What a file of results holds; a name is that of a file in benchmarks/results."""
    path = _file(path)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {} if empty is None else empty


def keep(path: Path | str, found: Any, indent: int | None = 1) -> None:
    """Write a file of results, replaced as a whole, so that an interruption leaves the older one."""
    path = _file(path)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(found, indent=indent) + "\n", encoding="utf-8")
    fresh.replace(path)


def _file(path: Path | str) -> Path:
    return path if isinstance(path, Path) else RESULTS / f"{path}.json"


def fill(path: Path | str, found: dict[str, Any], cases: Mapping[tuple[str, ...], Case], processes: int = 0) -> None:
    """Do the cases that are not found, and write and print each result when it is there.

    Args:
        found: results by the first of a case's names, in it by the second, and so on. processes: 0 for this one.
    """

    def done(names: tuple[str, ...], result: Any) -> None:
        place = found
        for name in names[:-1]:
            place = place.setdefault(name, {})
        place[names[-1]] = result
        keep(path, found)
        print(*names, result, sep="  ", flush=True)

    missing = {names: case for names, case in cases.items() if not has(found, names)}
    if not processes or not missing:
        for names, (function, *given) in missing.items():
            done(names, function(*given))
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        begun = {pool.submit(*case): names for names, case in missing.items()}
        for future in as_completed(begun):
            done(begun[future], future.result())


def has(found: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether there is a result under these names."""
    place: Any = found
    for name in names:
        if name not in place:
            return False
        place = place[name]
    return True


def trained(config: Config, prepared: Prepared | None = None) -> tuple[Federation, Progress]:
    """A whole run in this process, whose ledger is thrown away."""
    prepared = prepared or prepare(data_spec(config))
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.sqlite"
        Ledger.create(ledger, "r").close()
        job = federation(resolve(config, prepared.population), prepared, ledger, "r")
        progress = start(job)
        fit(job, Inline(job.context), progress)
    return job, progress


def accuracy(config: Config, prepared: Prepared | None = None) -> float:
    """Test accuracy of the last global model of a run."""
    return float(trained(config, prepared)[1].history[-1]["test_accuracy"])


# --- tables and pages ---------------------------------------------------------------------------------------------------


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows))


def mean_and_spread(values: Iterable[float], digits: int = 1, sign: str = "±") -> str:
    """Mean and sample standard deviation; nothing of no values."""
    values = list(values)
    spread = f" {sign} {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}" if values else ""


def put(page: str, mark: str, text: str, end: str = "<!-- end -->") -> None:
    """Put a text between its marks on a page of the documentation."""
    path = ROOT / "docs" / page
    before, found, after = path.read_text(encoding="utf-8").partition(f"{mark}\n")
    if not found or end not in after:
        raise SystemExit(f"{path} has no place for a table: put {mark} and {end} there")
    path.write_text(f"{before}{mark}\n{text}\n{end}{after.partition(end)[2]}", encoding="utf-8")
