"""What the documentation names exists, and its lines can be read."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache, reduce
from pathlib import Path

import fedveil
from source_trees import files_in, project_files, tree

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fedveil"
PAGES = [ROOT / "README.md", *files_in(ROOT / "docs", ".md")]
TOP = {file.relative_to(base).parts[0] for base in (ROOT, SOURCE) for file in files_in(base) if file.parent != base}
FILES: set[Path | str] = {*project_files(), *(file.name for file in files_in(ROOT / "tests"))}
NAME = re.compile(r"(?<![\w./-])fedveil(?:\.[A-Za-z_]\w*)+(?![\w.]*(?:/|\.toml))")
IMPORT = re.compile(r"from (fedveil[\w.]*) import (\w+(?:, \w+)*)")
PATH = re.compile(r"(?<![\w./*-])(?:[\w-]+/)+[\w-]+\.(?:py|md|toml|js|css|html|svg|png)(?![\w/])")
TEST = re.compile(r"`(test_\w+\.py)`")
MEMBER = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
WIDTH = 120


def docstrings(path: Path) -> str:
    """All that stands between three quotes: a hundred times as fast as a syntax tree, and other texts may be read as well."""
    return "\n".join(re.findall(r'"""(.*?)"""', path.read_text(), re.S))


@cache
def texts() -> dict[str, str]:
    """Pages as they are, and the docstrings of source, tests and benchmarks."""
    code = [path for folder in ("src", "tests", "benchmarks") for path in files_in(ROOT / folder, ".py")]
    code.remove(ROOT / "tests/test_moved.py")  # which names modules of 0.2
    found = {path: path.read_text() for path in PAGES} | {path: docstrings(path) for path in code}
    return {str(path.relative_to(ROOT)): text for path, text in found.items()}


def there(name: str) -> bool:
    """Whether a dotted name can be imported, or is an attribute of what can be."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ImportError as problem:
            if problem.name and not problem.name.startswith("fedveil"):  # of an extra that is not installed
                return not parts[end:] or parts[end] in defined(SOURCE.joinpath(*parts[1:end]).with_suffix(".py"))
            continue
        try:
            reduce(getattr, parts[end:], module)
        except AttributeError:
            return False
        return True
    return False


def defined(path: Path) -> set[str]:
    """The names at the top of a module."""
    found = set()
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {name.asname or name.name for name in node.names}
    return found


def names(text: str) -> set[str]:
    imported = {f"{module}.{name}" for module, found in IMPORT.findall(text) for name in found.split(", ")}
    members = {f"fedveil.{path[:-3].replace('/', '.')}.{name}" for path, name in MEMBER.findall(text)}
    return set(NAME.findall(text)) | imported | members


def missing_paths(text: str, folder: Path) -> list[str]:
    """Paths below a folder of the project or a room of the source that lead nowhere; PATTERNS in capitals are none."""
    paths = {path for path in PATH.findall(text) if path.split("/")[0] in TOP and not re.search(r"\b[A-Z]{3,}\b", path)}
    tests = {test for test in TEST.findall(text) if "tests/" in text and test not in FILES}
    return sorted({path for path in paths if not FILES & {base / path for base in (ROOT, SOURCE, folder)}} | tests)


def long_lines(text: str) -> list[str]:
    """Lines of prose above 120 characters; tables, code, headings, raw HTML and lines of one word may be longer."""
    prose = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.S | re.M)
    long = (line for line in prose.splitlines() if len(line) > WIDTH)
    return [line for line in long if not re.match(r"\||#|<|    |\s*- *$", line) and len(line.split()) > 2]


def test_every_name_exists() -> None:
    assert {where: gone for where, text in texts().items() if (gone := sorted(n for n in names(text) if not there(n)))} == {}
    assert [name for name in fedveil.__all__ if not there(f"fedveil.{name}")] == []


def test_programs_import_only_what_exists() -> None:
    """Benchmarks and programs of figures, also inside functions: from fedveil, and from each other."""
    files = {path.stem: path for folder in ("benchmarks", "docs") for path in files_in(ROOT / folder, ".py")}
    gone = set()
    for path in files.values():
        for node in ast.walk(tree(path)):
            for name in node.names if isinstance(node, ast.ImportFrom) else ():
                module = node.module or ""
                if module.split(".")[0] == "fedveil" and not there(f"{module}.{name.name}"):
                    gone.add(f"{path.name}: {module}.{name.name}")
                if module in files and name.name not in defined(files[module]):
                    gone.add(f"{path.name}: {module}.{name.name}")
    assert gone == set()


def test_every_path_exists() -> None:
    gone = {where: missing_paths(text, (ROOT / where).parent) for where, text in texts().items()}
    assert {where: paths for where, paths in gone.items() if paths} == {}


def test_prose_is_wrapped() -> None:
    pages = {*PAGES, *(file for file in files_in(ROOT, ".md") if file.parent == ROOT)}
    assert {page.name: lines for page in pages if (lines := long_lines(page.read_text()))} == {}


def test_what_is_not_there_and_what_is_too_long_are_found() -> None:
    text = "`fedveil.data.load.load` `fedveil.nowhere.load` `api/run.py: Run` `api/run.py: walk`\nfrom fedveil.errors import Gone"
    gone = {name for name in names(text) if not there(name)}
    assert gone == {"fedveil.nowhere." + "load", "fedveil.api.run.walk", "fedveil.errors.Gone"}
    page = "tests/, src/fedveil/api/" + "gone.py, api/run.py, `test_gone" + ".py`, runs/a/report.html, presets/METHOD/ROW.toml"
    assert missing_paths(page, ROOT) == ["src/fedveil/api/gone.py", "test_gone.py"]
    line = "word " * 30
    assert long_lines(f"{line}\n| {line}\n```\n{line}\n```\n    {line}") == [line]


def test_advisories_are_few_and_every_one_that_is_named_is_there() -> None:
    """An id is an anchor of the page, as links to it from other pages, and messages that name it, need."""
    page = (ROOT / "docs" / "advisories.md").read_text()
    listed = re.findall(r'^\| <a id="(a-\d{4}-\d\d)"></a>(A-\d{4}-\d\d) \|', page, re.M)
    names = [name for _, name in listed]
    assert [anchor.upper() for anchor, _ in listed] == names
    assert len(names) == len(set(names))
    assert sorted(names) == [f"A-2026-{number:02}" for number in range(1, len(names) + 1)]
    assert len(page.splitlines()) <= 150
    others = [path.read_text() for folder in ("src", "benchmarks") for path in files_in(ROOT / folder, ".py")]
    others += [page.read_text() for page in (*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md")]
    assert {name.upper() for text in others for name in re.findall(r"a-\d{4}-\d\d\b", text, re.I)} == set(names)
