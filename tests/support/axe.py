"""Accessibility of a page that a browser shows, checked by axe-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
RUN = """
const [only, done] = arguments;
axe.run(document, {preload: false, resultTypes: ['violations'], ...(only ? {runOnly: only} : {})})
  .then((found) => done(found.violations.map((v) => `${v.id}: ${v.nodes.length}, such as ${v.nodes[0].html.slice(0, 200)}`)));
"""


def violations(browser: Any, *tags: str) -> list[str]:
    """Return the violations of axe's rules, of all of them or of those with one of the tags."""
    if not SCRIPT.is_file():
        pytest.skip("needs axe-core: npm ci")
    browser.execute_script(SCRIPT.read_text())
    return list(browser.execute_async_script(RUN, [*tags] or None))
