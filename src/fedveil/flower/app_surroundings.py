"""What of a ClientApp lies outside a mod, as seen from a call of the mod: other mods, and functions without it.

Flower gives a mod neither its app nor its place in it. Both are on the call stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(frozen=True)
class Surroundings:
    """What surrounds a mod.

    Args:
        outside: names of what handles a reply after the mod. within: whether the mod is called inside another of its kind.
        bare: names of the app's functions that are registered without the mod.
    """

    outside: tuple[str, ...] = ()
    within: bool = False
    bare: tuple[str, ...] = ()

    @classmethod
    def of(cls, frame: FrameType | None, mod: type) -> Surroundings:
        """Those of a mod, from the frame that called it; nothing where no ClientApp did."""
        from flwr.clientapp import ClientApp

        called, within, outside = mod.__call__.__code__, False, []
        while frame is not None and frame.f_code is not ClientApp.__call__.__code__:
            within |= frame.f_code is called
            if not (frame.f_code.co_name == "new_ffn" and str(frame.f_globals.get("__name__")).startswith("flwr.")):
                outside.append(frame.f_code.co_qualname)
            frame = frame.f_back
        if frame is None:
            return cls()
        functions = getattr(frame.f_locals.get("self"), "_registered_funcs", {})
        bare = [name for name, function in functions.items() if not any(isinstance(one, mod) for one in _mods(function))]
        return cls(tuple(outside), within, tuple(bare))


def _mods(function: Any) -> Iterator[Any]:
    """The mods that Flower put round a function, outermost first."""
    while (cells := _closure(function)).keys() >= {"_mod", "_ffn"}:
        yield cells["_mod"]
        function = cells["_ffn"]


def _closure(function: Any) -> dict[str, Any]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return {name: cell.cell_contents for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False)}
