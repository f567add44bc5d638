"""The privacy explorer: one self-contained HTML page with sliders for a configuration and curves of what it claims and proves."""

from __future__ import annotations

from pathlib import Path

from fedveil.pages.explorer_methods import explorer_values
from fedveil.pages.web_page import render, write_html


def write_explorer(path: Path) -> Path:
    """Write the privacy explorer and return its path; it opens from disk and sends nothing anywhere.

    Args:
        path: the HTML file to write, or a folder, which then gets `explore.html`; parent folders are made.

    Raises:
        ConfigError: the file cannot be written there.
    """
    path = Path(path)
    page = render("explore.js", explorer_values(), "explore.html")
    return write_html(path / "explore.html" if path.is_dir() else path, page, "explorer")
