"""The privacy explorer: one self-contained HTML page with sliders for a configuration and curves of what it claims and proves."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from fedveil.errors import ConfigError

_PLACE = re.compile(r"\{\{([a-z]+\.(?:css|js))\}\}")


def web_file(name: str) -> str:
    """The text of one of the page's parts (`theme.css`, `chart.js`, ...), to be inlined in a page.

    Args:
        name: file name in `fedveil/pages/web`.
    """
    part = files("fedveil").joinpath("pages", "web", name)
    if not part.is_file():
        raise ConfigError(f"fedveil has no web part named {name!r}; reinstall the package if its files are incomplete")
    return part.read_text(encoding="utf-8")


def inline(template: str) -> str:
    """The template with every `{{file.css}}` and `{{file.js}}` replaced by that file, so that the page needs no network.

    Args:
        template: HTML text.
    """
    return _PLACE.sub(
        lambda found: web_file(found[1]).strip().replace("</", r"<\/" if found[1].endswith("js") else "</"), template
    )


def write_explorer(path: Path) -> Path:
    """Write the privacy explorer and return its path; it opens from disk and sends nothing anywhere.

    Args:
        path: the HTML file to write, or a folder, which then gets `explore.html`; parent folders are made.

    Raises:
        ConfigError: the file cannot be written there.
    """
    path = Path(path)
    target = path / "explore.html" if path.is_dir() else path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(inline(web_file("explore.html")), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the explorer to {target}: {error.strerror}; choose a path you may write to") from error
    return target
