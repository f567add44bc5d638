"""The house of docs/architecture.md, checked from the imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from source_trees import files_in, tree

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fedveil"
LANGUAGES = (".py", ".js", ".css", ".html")
ROOMS = (
    "moved",
    "verify",
    "errors",
    "registry",
    "accounting",
    "ledger",
    "drawing",
    "data",
    "tasks",
    "training",
    "mechanism",
    "secure_aggregation",
    "gradients",
    "release",
    "models",
    "methods",
    "federation",
    "executors",
    "statement",
    "experiment",
    "platforms",
    "audit",
    "attacks",
    "studies",
    "report",
    "testing",
    "api",
    "cli",
    "papers",
    "deploy",
)
"""From low to high: a room imports only rooms before it. `fedveil/__init__.py` imports the lowest alone;
`fedveil/__main__.py` is above all."""


def imports(file: ast.Module, modules: set[str], *, places: bool = True) -> set[str]:
    """Those of `modules` that a file imports anywhere: at its top, in functions, for type checking; and by `places`.

    places: count strings "module:name" too, which a registry imports when they are looked up.
    """
    found = set()
    for node in ast.walk(file):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            below = {f"{node.module}.{name.name}" for name in node.names}
            found |= below & modules or {node.module}
        elif places and isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
            found.add(node.value.partition(":")[0])
    return found & modules


def order(module: str) -> int:
    """How high a module's room is."""
    return (ROOMS[0], "fedveil", *ROOMS[1:], "__main__").index(module.split(".")[1] if "." in module else module)


def upward(graph: dict[str, set[str]]) -> list[str]:
    return sorted(f"{a} imports {b}" for a, others in graph.items() for b in others if order(b) > order(a))


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    own = [path for path in files_in(SOURCE, ".py") if "templates" not in path.parts]  # those are files of another project
    files = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path for path in own}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    return {name: imports(tree(path), set(files), places=name != "fedveil") for name, path in files.items()}


def test_every_room_has_its_place_and_a_sentence() -> None:
    rooms = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in files_in(SOURCE, ".py")}
    assert rooms - {"__init__", "__main__"} == set(ROOMS)
    for init in files_in(SOURCE, "__init__.py"):
        assert ast.get_docstring(tree(init)), f"{init} does not say what its room is for"


def test_the_page_lists_the_rooms_in_this_order() -> None:
    table = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", (ROOT / "docs/architecture.md").read_text(), re.M)
    assert table == list(reversed(ROOMS))


def test_no_room_imports_a_higher_one(graph: dict[str, set[str]]) -> None:
    assert upward(graph) == []
    assert graph["fedveil"] == {"fedveil.moved"}, "import fedveil is quick: its names load what they need when first used"
    table = ast.walk(tree(SOURCE / "methods/method_table.py"))
    assert not [node for node in table if isinstance(node, ast.Import | ast.ImportFrom)], "read to find a name"


def test_there_is_no_circle(graph: dict[str, set[str]]) -> None:
    assert circle(graph) == []


def test_no_room_is_above_a_fifth_of_the_source() -> None:
    lines: Counter[str] = Counter()
    for path in files_in(SOURCE):
        if path.suffix in LANGUAGES:
            lines[path.relative_to(SOURCE).parts[0]] += len(path.read_text().splitlines())
    room, most = lines.most_common(1)[0]
    assert most <= lines.total() / 5, f"{room} has {most} of {lines.total()} lines"


def test_no_class_has_the_name_of_one_in_another_room() -> None:
    """Those of the Python API apart, which are the faces of what has their names inside."""
    rooms = defaultdict(set)
    for path in files_in(SOURCE, ".py"):
        if "api" in path.parts:
            continue
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                rooms[node.name].add(path.relative_to(SOURCE).parts[0])
    twice = {name for name, found in rooms.items() if len(found) > 1}
    assert twice <= {"Plan"}, "of a release (mechanism), and of gradients (gradients/per_example.py)"


def test_matplotlib_is_imported_in_one_room() -> None:
    users = defaultdict(set)
    for path in files_in(SOURCE, ".py"):
        for node in ast.walk(tree(path)):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "matplotlib" for name in names):
                users[path.relative_to(SOURCE).parts[0]].add(path.name)
    assert set(users) == {"drawing.py"}, dict(users)


def test_the_picture_shows_the_packages_as_they_are() -> None:
    program = "import make_structure_figure as m; print(m.picture(m.packages()), end='')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT / "docs/figures", capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "docs/figures/structure.svg").read_text()


def test_mechanisms_import_no_torch() -> None:
    """A plan, its price, its grid and its noise are of numpy; torch is loaded where a draw takes its sines from it."""
    program = (
        "import importlib, pkgutil, sys, fedveil.mechanism as room\n"
        "for module in pkgutil.iter_modules(room.__path__): importlib.import_module(f'fedveil.mechanism.{module.name}')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


MAKE_CONFIGURATIONS = ("studies", "api", "cli", "testing", "report", "papers")
"""Rooms that read, make, compare and show configurations."""
CONFIGURATION_FILES = {
    f"experiment/{name}.py"
    for name in ("config", "config_files", "model_section", "own_model", "plugins", "public_setting", "sections")
}
"""Files of the room that resolves them, which do so too."""
JUDGE = {
    "experiment/certify.py": {"certify_config", "certified", "plan_table"},
    "experiment/public_values.py": {"public_values", "beside_the_releases", "_own_code", "_features"},
    "experiment/recertify.py": {"_relabelled", "_statement", "_of_card", "_nominal"},
    "experiment/data_card.py": {"recorded", "same_handed_over"},
    "experiment/resume.py": {"same_run"},
    "experiment/run.py": {"refuse_secret_search"},
    "experiment/resolve.py": {"data_spec", "has_user_defined_parts", "with_run", "resolve"},
    "deploy/consent.py": {"judged_in_time", "_refuse_code", "_refuse_work", "_refuse_columns", "_refuse_unmasked"},
    "deploy/demo_network.py": {"_own_table", "with_clients"},
    "deploy/offers.py": {"offer_of"},
}
"""Functions elsewhere that read a configuration before it is resolved: to describe, offer, compare, refuse or certify it."""
RESOLVE = {"resolve", "resolve_here", "opened"}


def unresolved(files: dict[str, ast.Module], holders: set[str]) -> list[str]:
    """Parameters and fields whose type is, or holds, a configuration, in functions that do not resolve it themselves."""
    found = []
    for name, file in files.items():
        for node in ast.walk(file):
            if isinstance(node, ast.ClassDef):
                held = [part for part in node.body if isinstance(part, ast.AnnAssign) and holders & names_in(part.annotation)]
                found += [f"{name}: {node.name}" for _ in held]
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name in JUDGE.get(name, set()):
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            calls = {call.func.id for call in ast.walk(node) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}
            if not calls & RESOLVE and any(one.annotation is not None and holders & names_in(one.annotation) for one in given):
                found.append(f"{name}: {node.name}")
    return found


def names_in(annotation: ast.expr) -> set[str]:
    """The names in a type, of quoted ones as well."""
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(annotation) if isinstance(node, ast.Attribute)}
    quoted = [node.value for node in ast.walk(annotation) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return names | {word for text in quoted for word in re.findall(r"\w+", text)}


def holding(files: Iterable[ast.Module]) -> set[str]:
    """`Config`, and every class with a field whose type is one of these."""
    classes = [node for file in files for node in ast.walk(file) if isinstance(node, ast.ClassDef)]
    fields = {c.name: set().union(*(names_in(p.annotation) for p in c.body if isinstance(p, ast.AnnAssign))) for c in classes}
    holders = {"Config"}
    while more := {name for name, types in fields.items() if types & holders} - holders:
        holders |= more
    return holders


def makes_configurations(name: str) -> bool:
    return name in CONFIGURATION_FILES or name.removesuffix(".py").split("/")[0] in MAKE_CONFIGURATIONS


def test_a_configuration_is_resolved_once() -> None:
    """After `resolve` no parameter is a `Config` or holds one."""
    own = {str(path.relative_to(SOURCE)): tree(path) for path in files_in(SOURCE, ".py") if "templates" not in path.parts}
    after = {name: file for name, file in own.items() if not makes_configurations(name)}
    assert unresolved(after, holding(after.values())) == []
    listed = {f"{name}: {function}" for name, functions in JUDGE.items() for function in functions}
    defined = {f"{name}: {n.name}" for name, file in own.items() for n in ast.walk(file) if isinstance(n, ast.FunctionDef)}
    assert listed <= defined


def test_a_configuration_that_is_handed_on_is_found() -> None:
    text = "class Spec:\n    config: Config\ndef f(x: Spec): ...\ndef g(x: 'Config | None'): ...\ndef h(x: Config): resolve(x)"
    file = ast.parse(text)
    assert holding([file]) == {"Config", "Spec"}
    assert unresolved({"a.py": file}, {"Config", "Spec"}) == ["a.py: Spec", "a.py: f", "a.py: g"]


def test_text_is_read_and_written_in_one_encoding_whatever_the_locale() -> None:
    """By the methods of paths, and by `open` without a b in its mode."""
    bare = []
    for path in files_in(SOURCE, ".py"):
        for call in (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)):
            method = isinstance(call.func, ast.Attribute)
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            modes = [one for one in call.args if isinstance(one, ast.Constant) and re.fullmatch(r"[rwxa]\+?t?", str(one.value))]
            text = method and (name, len(call.args)) in (("read_text", 0), ("write_text", 1))
            text |= name in ("open", "NamedTemporaryFile") and bool(modes)
            if text and "encoding" not in {word.arg for word in call.keywords}:
                bare.append(f"{path.name}:{call.lineno}")
    assert not bare, bare


def test_imports_are_found_wherever_they_stand() -> None:
    modules = {"fedveil", "fedveil.data.load", "fedveil.errors", "fedveil.methods.base", "fedveil.tasks.task"}
    text = (
        "from fedveil.data import load\nif True:\n    from fedveil.errors import E\ndef f():\n    import fedveil.methods.base, os"
    )
    found = {"fedveil.data.load", "fedveil.errors", "fedveil.methods.base"}
    assert imports(ast.parse(text), modules) == found
    assert imports(ast.parse(f"{text}\nT = {{'task': 'fedveil.tasks.task:Task'}}"), modules) == {*found, "fedveil.tasks.task"}


def test_an_arrow_up_and_a_circle_are_found() -> None:
    assert upward({"fedveil.data.load": {"fedveil.methods.base", "fedveil.errors"}}) == [
        "fedveil.data.load imports fedveil.methods.base"
    ]
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_what_tests_share_lies_in_tests_support() -> None:
    tests = {path.stem: path for path in files_in(ROOT / "tests", ".py") if path.name.startswith("test_")}
    named = {path.name: set(re.findall(r"^ *(?:from|import) (test_\w+)", path.read_text(), re.M)) for path in tests.values()}
    others = {name: (found & set(tests)) - {name.removesuffix(".py")} for name, found in named.items()}
    assert {name: found for name, found in others.items() if found} == {}
