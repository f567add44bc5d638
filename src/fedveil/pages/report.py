"""The report of one or several runs: one self-contained HTML page, readable without a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError
from fedveil.pages.explorer import inline, web_file
from fedveil.pages.report_page import page_values
from fedveil.run.recorded_run import read_run
from fedveil.run.run_directory import plain

MOST_RUNS = 60


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of these run directories and return its path.

    Args:
        runs: run directories; those that differ in their seed only are shown as one, with their mean and range.
        out: the HTML file; by default `report.html` in the run directory, or in the working directory for several runs.

    Raises:
        ConfigError: no run, more than 60, the same one twice, one that cannot be read, or a page that cannot be written.
    """
    paths = [Path(run) for run in runs]
    if not 1 <= len(paths) <= MOST_RUNS:
        raise ConfigError(f"a report shows 1 to {MOST_RUNS} runs, got {len(paths)}")
    if len({p.resolve() for p in paths}) < len(paths):
        raise ConfigError(f"a run is given twice: {', '.join(map(str, paths))}; give each run directory once")
    target = Path(out) if out is not None else (paths[0] / "report.html" if len(paths) == 1 else Path("report.html"))
    page = render_page(page_values([read_run(p) for p in paths]))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report to {target}: {error.strerror}; choose a path you may write to") from error
    return target


def render_page(values: dict[str, Any]) -> str:
    """The page with its values inside, escaped so that no text of a run can end the element that holds them."""
    text = json.dumps(plain(_short(values)), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    safe = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return inline(web_file("report.html")).replace("{{data}}", safe)


def _short(value: Any) -> Any:
    """Numbers to 6 digits, which is more than a picture shows."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return [_short(v) for v in value] if isinstance(value, list | tuple) else value
