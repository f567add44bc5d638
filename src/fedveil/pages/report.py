"""The report of one or several runs: one self-contained HTML page, readable without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError
from fedveil.pages.report_page import page_values
from fedveil.pages.web_page import render, write_html
from fedveil.run.recorded_run import read_run
from fedveil.run.verification import verification
from fedveil.verify import Verification

MOST_RUNS = 60


def write_report(
    runs: Sequence[str | Path],
    out: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    checked: Mapping[Path, Verification] | None = None,
) -> Path:
    """Write the report of these run directories and return its path.

    Args:
        runs: run directories; those that differ in their seed only are shown as one, with their mean and range.
        out: the HTML file; by default `report.html` in the run directory, or in the working directory for several runs.
        progress: called with the rows of a ledger that are verified, and all of it.
        checked: what is found by verifying them, where that is known already.

    Raises:
        ConfigError: no run, more than 60, the same one twice, one that cannot be read, or a page that cannot be written.
    """
    paths = [Path(run) for run in runs]
    if not 1 <= len(paths) <= MOST_RUNS:
        raise ConfigError(f"a report shows 1 to {MOST_RUNS} runs, got {len(paths)}")
    if len({p.resolve() for p in paths}) < len(paths):
        raise ConfigError(f"a run is given twice: {', '.join(map(str, paths))}; give each run directory once")
    target = Path(out) if out is not None else (paths[0] / "report.html" if len(paths) == 1 else Path("report.html"))
    shown = [read_run(path) for path in paths]
    checked = checked or {path: verification(path, on_step=progress) for path in paths}
    values = page_values(shown, progress, checked)
    return write_html(target, render("report.js", _short(values)), "report", private=bool(values["charts"]["private"]))


def _short(value: Any) -> Any:
    """Numbers to 6 digits, which is more than a picture shows."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return [_short(v) for v in value] if isinstance(value, list | tuple) else value
