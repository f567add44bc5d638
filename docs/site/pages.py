"""The pages of the site that are not below docs/ as they stand: a hook of mkdocs (mkdocs.yml), pure functions first.

README, changelog, contributing and security policy come from the root, and figures of the examples from examples/. Links to code
become plain text: the site holds no code. The reference is made from the docstrings of the public names, notebooks from the
outputs that docs/notebooks/run_notebooks.py stored in them.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections import defaultdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[2]
AT_ROOT = {"README.md": "index.md"} | {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
"""A link or picture of Markdown: mark, text, target, anchor; the text may hold a picture."""
CODE = re.compile(r"(^ *```.*?^ *```$|^(?: {4}[^\n]*\n)+)", re.S | re.M)
"""Blocks of code, which stay as they are."""
SHIM = re.compile(r'https://[^"]*/iframe-worker/shim')
PARTS = {
    "federations": ("Federations and runs", {"api"}),
    "data": ("Data", {"data"}),
    "configuration": ("Configuration, training and verification", {"experiment"}),
    "training": ("Statement", {"statement"}),
    "models": ("Models and tasks", {"models", "tasks"}),
    "methods": ("Methods", {"methods", "papers"}),
    "flower": ("Inside Flower and other platforms", {"deploy", "platforms"}),
    "errors": ("Errors", {"errors"}),
}
"""Pages of the reference: title, and the rooms whose public names they list."""


def place(target: str, page: str) -> str | None:
    """Where a link of the file `page` of the checkout leads in the site, or None where the site has no such file."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    if path in AT_ROOT:
        return AT_ROOT[path]
    if path.startswith("docs/notebooks/") and path.endswith(".ipynb"):
        return path.removeprefix("docs/").replace(".ipynb", ".md")
    if path.startswith("docs/") and (ROOT / path).is_file() and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return path if re.fullmatch(r"examples/\w+/\w+\.(svg|png)", path) and (ROOT / path).is_file() else None


def linked(text: str, page: str, at: str) -> str:
    """A page's text with the links of the site: `page` is its file in the checkout, `at` its place in the site."""

    def rewritten(match: re.Match[str]) -> str:
        mark, label, target, anchor = match[1], linked(match[2], page, at), match[3], match[4] or ""
        if not target or re.match(r"[a-z]+:", target):
            return f"{mark}[{label}]({target}{anchor})"
        if (ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(page), target))).is_dir() and not place(target, page):
            return label
        found = place(target, page)
        return f"{mark}[{label}]({posixpath.relpath(found, posixpath.dirname(at) or '.')}{anchor})" if found else label

    parts = CODE.split(text)
    return "".join(part if index % 2 else LINK.sub(rewritten, part) for index, part in enumerate(parts))


def reference() -> dict[str, str]:
    """The pages of the reference: each public name of `fedveil` with its docstring, by mkdocstrings."""
    rooms: dict[str, list[tuple[str, str]]] = defaultdict(list)
    stub = ast.parse((ROOT / "src" / "fedveil" / "__init__.pyi").read_text())
    renamed = {n.value.id: n.targets[0].id for n in stub.body if isinstance(n, ast.Assign)}  # type: ignore[attr-defined]
    for node in stub.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fedveil."):
            for name in node.names:
                public = renamed.get(name.name, name.name)
                rooms[node.module.split(".")[1]].append((public, f"{node.module}.{name.name}"))
    pages = {}
    for stem, (title, own) in PARTS.items():
        names = sorted(one for room in own for one in rooms.pop(room, []))
        lines = [f"# {title}", "", "`import fedveil as fv`", ""]
        for public, where in names:
            lines += [f"::: {where}", "    options:", f"      heading: fv.{public}", f"      toc_label: fv.{public}", ""]
        pages[f"reference/{stem}.md"] = "\n".join(lines)
    assert not rooms, f"no page of the reference lists {dict(rooms)}"
    return pages


def notebook(text: str) -> str:
    """A notebook as Markdown: prose, code, and what the cells printed or showed."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [shown for output in cell["outputs"] if (shown := _output(output))]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f'<pre class="output">{escape("".join(output["text"]))}</pre>'
    data = {kind: "".join(value) for kind, value in output["data"].items()}
    if "text/html" in data:
        return f'<div class="output">{data["text/html"]}</div>'
    return f'<pre class="output">{escape(data["text/plain"])}</pre>'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """mkdocs: add the pages that are not below docs/."""
    from mkdocs.structure.files import File

    for source, at in AT_ROOT.items():
        files.append(File.generated(config, at, content=linked((ROOT / source).read_text(), source, at)))
    for path in sorted((ROOT / "examples").glob("*/*.svg")):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook(path.read_text())))
    for at, text in reference().items():
        files.append(File.generated(config, at, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs: the links of a page of docs/ lead to pages of the site."""
    at = page.file.src_uri
    return markdown if at in AT_ROOT.values() or at.startswith("reference/") else linked(markdown, f"docs/{at}", at)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """mkdocs: the script that lets search work from disk is the site's own copy, not one from the network."""
    own = posixpath.relpath("site/iframe-worker.js", posixpath.dirname(page.url) or ".")
    return SHIM.sub(own, output)


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """mkdocs: the same for pages that no file has."""
    return SHIM.sub("site/iframe-worker.js", output_content)
