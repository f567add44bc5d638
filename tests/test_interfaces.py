"""No public function takes more than seven parameters: what belongs together travels as one object.

Constructors that dataclasses and pydantic write are exempt, for each of their fields has a line of its own; so are the commands
of the program, whose parameters are its options.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from source_trees import files_in, tree

SOURCE = Path(__file__).parents[1] / "src" / "fedveil"
MOST = 7

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Functions of a module and methods of its classes that have no underscore in front; `__init__` and `__call__` are public."""

    def within(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from within(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, Function) and (not node.name.startswith("_") or node.name in ("__init__", "__call__")):
                yield f"{prefix}{node.name}", node

    return within(tree.body, "")


def is_command(function: Function) -> bool:
    """Whether typer makes a command of it."""
    calls = [d.func for d in function.decorator_list if isinstance(d, ast.Call)]
    return any(isinstance(c, ast.Attribute) and c.attr in ("command", "callback") for c in calls)


def parameters(function: Function) -> int:
    """How many parameters a caller can give, without `self` and `cls`."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    own = len(names) - (names[:1] in (["self"], ["cls"]))
    return own + (arguments.vararg is not None) + (arguments.kwarg is not None)


def too_large() -> dict[str, int]:
    found = {}
    for path in files_in(SOURCE, ".py"):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for name, function in public_functions(tree(path)):
            count = parameters(function)
            if count > MOST and not is_command(function):
                found[f"{module}.{name}"] = count
    return found


def test_no_public_function_takes_more_than_seven_parameters() -> None:
    assert too_large() == {}


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("def f(a, b, /, c, *, d): ...", {"f": 4}),
        ("def f(*a, **b): ...", {"f": 2}),
        ("class A:\n    def f(self, a): ...\n    @classmethod\n    def g(cls, a, b): ...", {"A.f": 1, "A.g": 2}),
        ("class A:\n    def __init__(self, a): ...\n    def __eq__(self, a): ...", {"A.__init__": 1}),
        ("def _f(a): ...\nclass _A:\n    def f(self): ...", {}),
        ("def f(a):\n    def inner(b, c): ...", {"f": 1}),
        ("async def f(a): ...", {"f": 1}),
    ],
)
def test_the_count_is_right(code: str, wanted: dict[str, int]) -> None:
    assert {name: parameters(function) for name, function in public_functions(ast.parse(code))} == wanted


def test_commands_are_told_from_functions() -> None:
    code = "@app.command('x')\ndef a(): ...\n@data.callback()\ndef b(): ...\n@cache\ndef c(): ...\n@wraps(a)\ndef d(): ..."
    assert [is_command(function) for _, function in public_functions(ast.parse(code))] == [True, True, False, False]
