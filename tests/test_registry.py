"""Looking things up by name, and registering one's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import fedveil as fv
from fedveil.errors import ConfigError
from fedveil.methods.method_registry import METHODS
from fedveil.registry import Registry


def first() -> None:
    """Registered by this module."""


def registry() -> Registry[object]:
    return Registry("thing.name", "thing", {"path": "pathlib:Path", "two": 2}, "one of your own needs its file")


def test_a_name_is_known_before_its_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "looked_up_late.py").write_text("class Late: ...")
    monkeypatch.syspath_prepend(tmp_path)
    found: Registry[type] = Registry("thing.name", "thing", {"late": "looked_up_late:Late"})
    assert list(found) == ["late"]
    assert "late" in found
    assert "looked_up_late" not in sys.modules
    kind = found["late"]
    assert kind.__name__ == "Late"
    assert found["late"] is kind


def test_places_and_things_are_found_alike() -> None:
    assert dict(registry()) == {"path": Path, "two": 2}
    assert registry().find("path") is Path


def test_an_unknown_name_is_refused_with_its_key_the_nearest_and_what_to_do() -> None:
    message = "thing.name = 'pathh': unknown thing (did you mean 'path'?); there are path, two; one of your own needs its file"
    with pytest.raises(ConfigError) as refused:
        registry().find("pathh")
    assert str(refused.value) == message
    with pytest.raises(ConfigError, match=r"--things pathh: unknown thing .did you mean 'path'"):
        registry().find("pathh", "--things")


def test_a_name_belongs_to_one_module() -> None:
    found = registry()
    found.add("own", first, first)
    found.add("own", 3, first)
    assert found["own"] == 3
    with pytest.raises(
        ConfigError, match=r"the name 'own' of Registry belongs to first of (\w+\.)*test_registry: choose another"
    ):
        found.add("own", 4, Registry)
    with pytest.raises(ConfigError, match=r"the name 'path' of first belongs to Path of pathlib: choose another"):
        found.add("path", 4, first)
    with pytest.raises(ConfigError, match=r"the name 'two' of first belongs to a thing of fedveil: choose another"):
        found.add("two", 4, first)
    del found["own"]
    found.add("own", 4, Registry)
    assert found["own"] == 4
    assert len(found) == 3


@pytest.mark.parametrize("name", METHODS)
def test_a_line_of_the_table_is_all_that_a_method_needs_to_be_found(name: str) -> None:
    kind = METHODS[name]
    assert kind.model_fields["name"].default == name
    assert getattr(fv, kind.__name__) is kind
    assert kind.__name__ in fv.__all__
