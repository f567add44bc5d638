"""Unit, adjacency and view may be given by name; a name that is none of them is refused, and never takes a branch by chance."""

from __future__ import annotations

from typing import Any

import pytest

from fedveil.accounting.accountant import bound
from fedveil.accounting.subsampled import rdp
from fedveil.accounting.types import Adjacency, SampledGaussian, Scope, Unit, View
from fedveil.errors import ConfigError


@pytest.mark.parametrize("unit", list(Unit))
@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("view", list(View))
def test_names_are_converted(unit: Unit, adjacency: Adjacency, view: View) -> None:
    named: Any = Scope(str(unit), str(adjacency), str(view))  # type: ignore[arg-type]
    meant = Scope(unit, adjacency, view)
    assert named == meant
    assert (named.unit is unit, named.adjacency is adjacency, named.view is view) == (True, True, True)
    assert named.update_factor == meant.update_factor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("person", "zero_out", "server"), "unit = 'person': it must be one of record, client"),
        (("client", "replace-one", "server"), "adjacency = 'replace-one': it must be one of zero_out, replace_one"),
        (("client", "zero_out", None), "view = None: it must be one of server, aggregate, final"),
    ],
)
def test_other_names_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scope(*arguments)


def test_an_adjacency_by_name_costs_what_the_adjacency_costs() -> None:
    """As a string, replace-one was charged as zero-out once."""
    orders, event = [2.0, 8.0, 32.0], SampledGaussian(0.1, 1.0, 20)
    for adjacency in Adjacency:
        name: Any = str(adjacency)
        assert rdp(0.1, 1.0, orders, adjacency=name).tolist() == rdp(0.1, 1.0, orders, adjacency=adjacency).tolist()
        for accountant in ("rdp", "pld"):
            costs = [bound([event], 1e-5, accountant=accountant, adjacency=a)[0] for a in (name, adjacency)]  # type: ignore[arg-type]
            assert costs[0] == costs[1]
    assert (
        rdp(0.1, 1.0, orders, adjacency=Adjacency.ZERO_OUT).tolist()
        != rdp(0.1, 1.0, orders, adjacency=Adjacency.REPLACE_ONE).tolist()
    )
    wrong: Any = "replace-one"
    for accountant in ("rdp", "pld"):
        with pytest.raises(ConfigError, match="adjacency = 'replace-one'"):
            bound([event], 1e-5, accountant=accountant, adjacency=wrong)  # type: ignore[arg-type]
