"""Self-contained HTML pages, assembled from the templates, styles and scripts of `web/` and the values to draw."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedveil.errors import ConfigError
from fedveil.experiment.run_directory import plain
from fedveil.ledger.files import write_output

_PLACE = re.compile(r"\{\{([a-z]+\.(?:css|html|js))\}\}")


def web_file(name: str) -> str:
    """Return the text of one of the pages' parts (`theme.css`, `chart.js`, ...).

    Args:
        name: file name in `fedveil/report/web`.
    """
    part = files("fedveil").joinpath("report", "web", name)
    if not part.is_file():
        raise ConfigError(f"fedveil has no web part named {name!r}; reinstall the package if its files are incomplete")
    return part.read_text(encoding="utf-8")


def inline(template: str) -> str:
    """Return the template with each `{{file}}` replaced by that file's text, so that the page needs no network.

    Args:
        template: HTML text. A script cannot end the element that holds it; an HTML file may name other files.
    """

    def text_of(place: re.Match[str]) -> str:
        text = web_file(place[1]).strip()
        if place[1].endswith("html"):
            return inline(text)
        return text.replace("</", r"<\/") if place[1].endswith("js") else text

    return _PLACE.sub(text_of, template)


def render(script: str, values: dict[str, Any], template: str = "page.html") -> str:
    """Return the page that `script` draws from `values`, escaped so that a run's text cannot end the element that holds it."""
    text = json.dumps(plain(values), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    safe = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return inline(web_file(template).replace("[[script]]", f"{{{{{script}}}}}")).replace("[[data]]", safe)


def write_html(path: Path, page: str, what: str, *, private: bool = False) -> Path:
    """Write a page, with the folders above it, and return its path.

    Args:
        what: the page's name in an error message. private: the page shows private figures, so the file has mode 600.

    Raises:
        ConfigError: the file cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_output(path, page.encode(), private=private)
    except OSError as error:
        raise ConfigError(f"cannot write the {what} to {path}: {error.strerror}; choose a path you may write to") from error
    return path
