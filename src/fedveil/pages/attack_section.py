"""The attacks of a report: every attack*.json and .png of the run directories, picture and figures of one attack together."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from fedveil.run.recorded_run import RunData

Values = dict[str, Any]


def attack_values(runs: list[RunData], room: list[int]) -> list[Values]:
    """What the page shows of each attack: its name, figures, assumptions, and its picture as long as there is room.

    room: bytes left for pictures, in a list of one, which is counted down.
    """
    stems = {p.with_suffix("") for run in runs for p in run.path.glob("attack*") if p.suffix in (".png", ".json")}
    return [_attack(stem, room) for stem in sorted(stems)]


def _attack(stem: Path, room: list[int]) -> Values:
    values: Values = {"name": stem.name.removeprefix("attack-")}
    record, picture = stem.with_name(stem.name + ".json"), stem.with_name(stem.name + ".png")
    if record.is_file():
        values |= _record(record)
    if picture.is_file():
        values |= _picture(picture, room)
    return values


def _record(path: Path) -> Values:
    """The headline and the assumptions that `fedveil attack` wrote; of another file its single figures."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return {"figures": [["not readable", path.name]], "assumptions": []}
    if isinstance(value, dict) and isinstance(value.get("figures"), dict):
        return {"figures": [[k, str(v)] for k, v in value["figures"].items()], "assumptions": value.get("assumptions", [])}
    return {"figures": [[k, f"{v:.4g}" if isinstance(v, float) else str(v)] for k, v in _leaves(value)][:60], "assumptions": []}


def _picture(path: Path, room: list[int]) -> Values:
    data = path.read_bytes()
    if len(data) > room[0]:
        return {"too_large": str(path)}
    room[0] -= len(data)
    return {"picture": f"data:image/png;base64,{base64.b64encode(data).decode()}"}


def _leaves(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in _leaves(v, f"{prefix}.{k}" if prefix else str(k))]
    return [] if isinstance(value, list) or value is None else [(prefix or "value", value)]
