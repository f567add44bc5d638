"""The documentation site: each page is in its navigation, links lead to pages, and its notebooks run and say what they said."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

import fedveil
from source_trees import files_in

ROOT = Path(__file__).parents[1]
NOTEBOOKS = files_in(ROOT / "docs" / "notebooks", ".ipynb")


def program(path: str) -> ModuleType:
    """A program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = program("docs/site/pages.py")
notebooks = program("docs/notebooks/run_notebooks.py")


def listed(nav: Any) -> Iterator[str]:
    """The files of a navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from listed(one)


def test_every_page_is_in_the_navigation() -> None:
    own = {str(path.relative_to(ROOT / "docs")) for path in files_in(ROOT / "docs", ".md")}
    made = {*pages.AT_ROOT.values(), *pages.reference(), *(f"notebooks/{path.stem}.md" for path in NOTEBOOKS)}
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert [title for part in navigation for title in part] == ["Start", "Guides", "Concepts", "Reference"]
    assert sorted(listed(navigation)) == sorted(own | made)


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(pages.reference().values())
    assert sorted(re.findall(r"heading: fv\.(\w+)", text)) == sorted(set(fedveil.__dir__()) - {"__version__"})


@pytest.mark.parametrize(
    ("link", "wanted"),
    [
        ("[a](docs/verify.md#x)", "[a](verify.md#x)"),
        ("![a](docs/figures/report.png)", "![a](figures/report.png)"),
        ("[`door`](src/fedveil/release/door.py)", "`door`"),
        ("[a](docs/methods/)", "a"),
        ("[![p](docs/figures/report.png)](CHANGELOG.md)", "[![p](figures/report.png)](CHANGELOG.md)"),
        ("[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("[a](docs/gone.md)", "a"),
        ("    [a](docs/verify.md)\n", "    [a](docs/verify.md)\n"),
    ],
)
def test_links_of_the_readme_become_those_of_the_site(link: str, wanted: str) -> None:
    assert pages.linked(link, "README.md", "index.md") == wanted


def words(cells: list[dict[str, Any]]) -> list[str]:
    """The outputs of a notebook without their numbers, which other machines and versions round otherwise."""
    shown = [output.get("text") or output["data"]["text/plain"] for cell in cells for output in cell.get("outputs", [])]
    return [re.sub(r" +", " ", re.sub(r"\b[\da-f]{64}\b|\d[\d.e-]*", "#", "".join(text))) for text in shown]


SLOW = ("first-run", "your-own-data")


@pytest.mark.heavy
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.slow] * (path.stem in SLOW), id=path.stem) for path in NOTEBOOKS]
)
def test_a_notebook_runs_and_says_what_it_said(path: Path, tmp_path: Path) -> None:
    stored = json.loads(path.read_text())
    assert "/tmp/" not in path.read_text()
    assert str(Path.home()) not in path.read_text()
    done = notebooks.run_notebook(stored, tmp_path)
    assert words(done["cells"]) == words(stored["cells"])
    assert all(cell["execution_count"] for cell in stored["cells"] if cell["cell_type"] == "code")


class Page(HTMLParser):
    """What a page links to and loads, and the places that links may lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.places |= {values[name] for name in ("id", "name") if name in values}
        if "src" in values or (tag == "link" and "href" in values):
            self.loaded.append(values.get("src") or values["href"])
        elif tag == "a" and "href" in values:
            self.links.append(values["href"])


def broken(site: Path) -> list[str]:
    """Links and files of the site that lead nowhere, and files that would come from the network."""
    read = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    found = []
    for path, page in read.items():
        for target in page.links + page.loaded:
            where, _, anchor = unquote(target).partition("#")
            if re.match(r"[a-z]+:|//", where):
                found += [f"{path.name} loads {target}"] if target in page.loaded and not where.startswith("data:") else []
                continue
            file = (path.parent / where.partition("?")[0]).resolve() if where else path
            there = (file / "index.html" if file.is_dir() else file).is_file()
            if path.name != "404.html" and not (there and (not anchor or file not in read or anchor in read[file].places)):
                found.append(f"{path.name}: {target}")
    return found


@pytest.mark.slow
def test_the_site_builds_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    if not all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert broken(tmp_path) == []
    for page, start in (("verify.html", "index.html"), ("methods/fedavg.html", "../index.html")):
        assert re.findall(r'<a href="([^"]*)"[^>]*md-logo', (tmp_path / page).read_text()) == [start] * 2
    entries = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    for word, page in (("imbalance", "tasks.html"), ("predict", "python.html"), ("missing", "data.html")):
        assert any(word in entry["text"] and entry["location"].startswith(page) for entry in entries), word


def test_what_leads_nowhere_is_found(tmp_path: Path) -> None:
    links = '<a href="gone.html"></a><a href="b.html#x"></a><a href="b.html#gone"></a>'
    (tmp_path / "a.html").write_text(links + '<script src="//cdn/x.js"></script>')
    (tmp_path / "b.html").write_text('<p id="x"><img src="data:x"><a href="https://example.org/"></a><a href="a.html"></a>')
    assert broken(tmp_path) == ["a.html: gone.html", "a.html: b.html#gone", "a.html loads //cdn/x.js"]
