"""Run the notebooks of this folder in this process, each in an empty directory: python docs/notebooks/run_notebooks.py

What a cell prints, and the value of its last line, are stored in the notebook; tests and site take them from there. A cell may
print nothing that names this machine.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def run_notebook(notebook: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The notebook with the outputs of its cells, run one after the other with `folder` as working directory."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    with contextlib.chdir(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                count += 1
                cell = cell | {"execution_count": count, "outputs": outputs("".join(cell["source"]), names, count)}
            cells.append(cell)
    return notebook | {"cells": cells}


def outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell: what it printed, then what its last line is."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, shown = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {count}", "exec"), names)
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names)
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": lines(printed.getvalue())})
    if shown is not None:
        data = {"text/plain": lines(repr(shown))}
        if hasattr(shown, "_repr_html_"):
            data["text/html"] = lines(shown._repr_html_())
        found.append({"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data})
    return found


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for path in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as empty:
            done = run_notebook(json.loads(path.read_text()), Path(empty))
        path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n")
        print(path.name)


if __name__ == "__main__":
    main()
