"""Where data of one's own come from and what was done to them, for the data card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Origin:
    """All of it but the casts is public: it follows from names and what the user said, not from the values of the data.

    source: what it was made from. features: names of the inputs. casts: changes of type, one line each; they go by the types that
    tables and lists have, which may follow from their values: one 34.5 makes floats of a column of integers.
    categories, missing: the public lists and constants with which columns were encoded. test: the rule of the test split.
    counted: what was counted in the data and is treated as public all the same.
    ranked: whether one example's time may decide if another one is for testing. timed: whether its own time decides.
    """

    source: str
    test: str
    features: tuple[str, ...] = ()
    casts: tuple[str, ...] = ()
    categories: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    missing: Mapping[str, object] = field(default_factory=dict)
    counted: tuple[str, ...] = ()
    ranked: bool = False
    timed: bool = False

    @property
    def public(self) -> dict[str, Any]:
        """What a data card holds."""
        return {key: value for key, value in asdict(self).items() if key != "casts"}
