"""The packages of fedveil and their imports, drawn from the code: python docs/figures/make_structure_figure.py."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src" / "fedveil"
WIDTH, ROW, BOX, GAP = 460, 52, 104, 24
STYLE = (
    "text{font:13px ui-sans-serif,system-ui,sans-serif;fill:#1f2933;text-anchor:middle}"
    "rect{fill:#eef4fb;stroke:#3a6ea5}path{fill:none;stroke:#8aa4c0}.page{fill:#ffffff;stroke:none}"
)


def packages() -> dict[str, set[str]]:
    """Return which packages each package imports, at the top of a file, in functions and for type checking."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if package.startswith("__") or "templates" in path.parts:
            continue
        names = found.setdefault(package, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedveil"):
                module = (node.module or "").split(".")
                names |= {module[1]} if module[1:] else {name.name for name in node.names}
            elif isinstance(node, ast.Import):
                names |= {part[1] for name in node.names if (part := name.name.split("."))[0] == "fedveil" and part[1:]}
    return {name: {other for other in others & found.keys() if other != name} for name, others in found.items()}


def layers(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the layer of each package: one above the highest that it imports."""
    level: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        level[name] = max((level[other] + 1 for other in graph[name]), default=0)
    return level


def direct(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports that no longer way implies."""
    below: dict[str, set[str]] = {}
    for name in TopologicalSorter(graph).static_order():
        below[name] = graph[name].union(*(below[other] for other in graph[name]))
    return {name: {other for other in others if not any(other in below[via] for via in others)} for name, others in graph.items()}


def picture(graph: Mapping[str, set[str]]) -> str:
    """Return the drawing as SVG: a package stands above all that it imports; arrows that others imply are left out."""
    level, top = layers(graph), max(layers(graph).values())
    rows = [sorted(name for name in graph if level[name] == row) for row in range(top + 1)]
    place = {}
    for row, names in enumerate(rows):
        left = (WIDTH - len(names) * BOX - (len(names) - 1) * GAP) / 2
        place |= {name: (left + i * (BOX + GAP) + BOX / 2, 30 + (top - row) * ROW) for i, name in enumerate(names)}
    lines = []
    for name, others in sorted(direct(graph).items()):
        for other in sorted(others):
            (x, y), (u, v) = place[name], place[other]
            bend = 0 if v - y <= ROW else 90 * (1 if x + u >= WIDTH else -1)
            lines.append(f'<path d="M{x:g} {y + 14:g}C{x + bend:g} {y + 36:g} {u + bend:g} {v - 36:g} {u:g} {v - 14:g}"/>')
    boxes = [
        f'<rect x="{x - BOX / 2:g}" y="{y - 14:g}" width="{BOX}" height="28" rx="6"/><text x="{x:g}" y="{y + 5:g}">{name}</text>'
        for name, (x, y) in sorted(place.items())
    ]
    height = 60 + top * ROW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="packages and imports">'
    page = f'<rect class="page" width="{WIDTH}" height="{height}"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", page, *lines, *boxes, "</svg>\n"])


if __name__ == "__main__":
    (HERE / "structure.svg").write_text(picture(packages()), encoding="utf-8")
