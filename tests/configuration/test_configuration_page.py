"""docs/configuration.md names every key and its default."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.experiment.config import Config

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
SECTIONS = {name: field.annotation for name, field in Config.model_fields.items() if name not in ("model", "method")}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_documented(section: str) -> None:
    part = PAGE.split(f"## [{section}]")[1].split("\n## ")[0]
    fields = SECTIONS[section].model_fields  # type: ignore[union-attr]
    assert fields
    documented = {line.split("`")[1] for line in part.splitlines() if line.startswith("| `")}
    assert documented == set(fields) | ({"client_timeout"} & documented)
