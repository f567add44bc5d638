"""What a statement adds about sampling: seen counts, secret samples of fixed size, users with several records."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

import method_kit as h
from fedveil.accounting._numbers import crossing
from fedveil.accounting.accountant import bound
from fedveil.accounting.types import (
    Adjacency,
    Event,
    FixedSampleGaussian,
    SampledGaussian,
    SeenCountGaussian,
    Unbounded,
    Unit,
    UserRecordsGaussian,
    View,
    at_most,
)
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify
from fedveil.methods.adaptive_clipping import AdaptiveClipping
from fedveil.methods.banded_mf import BandedMF
from fedveil.methods.base import Fixed
from fedveil.methods.dp_scaffold import DPScaffold
from fedveil.methods.fedavg import DPFedAvg, FedAvg
from fedveil.methods.method import Method
from fedveil.methods.setting import Setting
from fedveil.papers.fedglp_adp.fisher_baselines import FedADDP, FedDPA
from fedveil.papers.fedglp_adp.method import FedGLPADP
from fedveil.statement.statement import Statement
from fedveil.statement.statement_layout import from_dict, render, to_dict, to_markdown
from fedveil.statement.statement_text import if_seen, numbers_table
from fedveil.training.local import Client, Plain, Proximal, Remembering
from reference_costs import named_participants_delta

ZERO, REPLACE = Adjacency


def setting(**changes: Any) -> Setting:
    """40 of 200 clients a round, 16 rounds, aggregate view, z = 2."""
    changes = {"clients": 200, "cohort": 40, "rounds": 16, "delta": 1e-5, **changes}
    return h.setting(changes.pop("view", View.AGGREGATE), **changes)


def shown(s: Statement) -> str:
    out = io.StringIO()
    render(s, Console(file=out, width=80, color_system=None, legacy_windows=False))
    return " ".join(out.getvalue().split())


# --- seen counts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", Unit)
@pytest.mark.parametrize("adjacency", Adjacency)
def test_seen_count_is_priced_for_the_pair_of_the_scope(unit: Unit, adjacency: Adjacency) -> None:
    s = certify(DPFedAvg(), setting(sampling="poisson", unit=unit, adjacency=adjacency, colluders=3), batch_norm=False)
    factor = 1 if (unit, adjacency) == (Unit.CLIENT, ZERO) else 2
    pair = ZERO if factor == 1 else REPLACE
    expected, _ = bound([SeenCountGaussian(197, 0.2, 2 / factor, 16)], 1e-5, adjacency=pair)
    assert s.own.seen_count == expected
    assert s.proven.epsilon == bound([SampledGaussian(0.2, 2 / factor, 16)], 1e-5, adjacency=pair)[0]


class Shorter(DPFedAvg):
    """A method of one's own whose clients have no memory."""

    def client(self, s: Setting) -> Client:
        return Plain(Proximal(0.1))


class WithMemory(Plain, Remembering):
    """Plain training that may keep something."""


class Kept(DPFedAvg):
    """A method of one's own whose clients may keep something."""

    def client(self, s: Setting) -> Client:
        return WithMemory()


@pytest.mark.parametrize(
    ("method", "batch_norm", "forgets"),
    [
        (DPFedAvg(), False, True),
        (DPFedAvg(), True, False),
        (DPFedAvg(), None, False),
        (AdaptiveClipping(), False, True),
        (DPScaffold(), False, False),
        (FedGLPADP(), False, False),
        (FedDPA(), False, False),
        (FedADDP(), False, False),
        (Kept(), False, False),
        (Shorter(), False, True),
    ],
    ids=lambda value: getattr(type(value), "__name__", str(value)),
)
def test_who_sees_the_count_may_learn_the_names_from_what_clients_keep(
    method: Method, batch_norm: bool | None, forgets: bool
) -> None:
    s = certify(method, setting(sampling="poisson"), batch_norm=batch_norm)
    assert s.own.seen_count is not None
    crowd, _ = bound([SeenCountGaussian(200, 0.2, 2.0, 16)], 1e-5, adjacency=ZERO)
    named = crossing(lambda e: named_participants_delta(0.2, 2.0, 16, e) - 1e-5, 0.0, 50.0)
    assert named > 1.2 * crowd
    assert s.own.seen_count == pytest.approx(crowd if forgets else named, rel=1e-3)
    drawn = certify(method, setting(), batch_norm=batch_norm)
    fixed = isinstance(method.release(setting()), Fixed)
    assert any("drawn afresh" in note for note in drawn.notes) == (forgets and fixed)


def test_where_nothing_is_amplified_nothing_is_seen() -> None:
    for s in (
        setting(),
        setting(sampling="poisson", cohort=200),
        setting(sampling="poisson", view=View.SERVER),
        setting(sampling="poisson", min_survivors=10),
        setting(sampling="poisson", training={"local": "dp-sgd"}, unit=Unit.RECORD),
    ):
        found = certify(DPFedAvg(), s)
        assert {v.seen_count for v in found.views} == {None}
        assert "number of participants is seen" not in to_markdown(found)


def test_all_layouts_of_the_statement_show_the_seen_count_and_who_must_not_see_it() -> None:
    s = certify(DPFedAvg(), setting(sampling="poisson"))
    line = if_seen(s.own)
    assert s.own.seen_count is not None
    assert line.endswith(f"an attacker who knows it gets epsilon {at_most(s.own.seen_count)}")
    assert f"{at_most(s.proven.epsilon)} in the aggregate and final view: {line}" in shown(s)
    assert line in to_markdown(s)
    assert [row[2].note for row in numbers_table(s).rows[1:]] == [line, line]
    hidden = "who joined, and how many did, stays hidden from everybody but the server"
    assert sum(hidden in a.what for a in s.assumptions) == 1
    assert any("the ledger and the folder private of a run write it down" in text for text in s.not_protected)


def test_a_statement_of_version_0_1_is_read_without_a_seen_count() -> None:
    s = certify(DPFedAvg(), setting(sampling="poisson"))
    written = json.loads(json.dumps(to_dict(s), allow_nan=False))
    assert from_dict(written) == s
    for numbers in written["views"]:
        del numbers["seen_count"]
    old = from_dict(written)
    assert old.proven == s.proven
    assert old.own.seen_count is None


class Releases(DPFedAvg):
    """A method that says itself what it releases."""

    event: object

    def releases(self, s: Setting, view: View) -> list[Event]:
        sums = s.scope.view is not View.SERVER
        return [Unbounded("only sums are protected") if sums and view is View.SERVER else self.event]  # type: ignore[list-item]


SEEN, DRAWN = SeenCountGaussian(200, 0.2, 2.0, 16), FixedSampleGaussian(200, 40, 2.0, 16)


def test_other_kinds_of_amplification_are_believed_where_they_hold() -> None:
    seen = certify(Releases(event=SEEN), setting(sampling="poisson"))
    assert seen.proven.epsilon == bound([SEEN], 1e-5, adjacency=ZERO)[0]
    assert seen.own.seen_count is None, "it is the proven number already"
    assert any("and who joined stays hidden" in a.what for a in seen.assumptions)
    drawn = certify(Releases(event=DRAWN), setting())
    assert drawn.proven.epsilon == bound([DRAWN], 1e-5, adjacency=ZERO)[0]
    assert any("40 of 200 clients are drawn afresh" in a.what for a in drawn.assumptions)
    assert seen.learnability is not None
    assert drawn.learnability is not None


@pytest.mark.parametrize(
    ("event", "changes", "message"),
    [
        (SEEN, {"view": View.SERVER, "sampling": "poisson"}, "in the server view"),
        (DRAWN, {"view": View.SERVER}, "in the server view"),
        (SEEN, {}, "amplification by Poisson sampling .* drawn in fixed numbers: set training.sampling = 'poisson'"),
        (DRAWN, {"sampling": "poisson"}, "amplification by fixed-size sampling .* set training.sampling = 'fixed'"),
        (UserRecordsGaussian(1, 0.2, 2.0, 16), {"sampling": "poisson"}, "no records are sampled"),
        (replace(SEEN, rate=0.1), {"sampling": "poisson"}, "sampling rate 0.1 is credited"),
        (replace(DRAWN, cohort=20), {}, "sampling rate 0.1 is credited"),
    ],
)
def test_and_refused_where_they_do_not(event: Event, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        certify(Releases(event=event), setting(**changes))


# --- secret samples of fixed size ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", Adjacency)
def test_what_a_secret_sample_would_give_is_a_remark(adjacency: Adjacency) -> None:
    s = certify(DPFedAvg(), setting(adjacency=adjacency), batch_norm=False)
    z = 2 / adjacency.factor
    secret, _ = bound([FixedSampleGaussian(200, 40, z, 16)], 1e-5, adjacency=adjacency)
    assert s.own.mu == pytest.approx(4 / z), "the proven number does not count on it"
    assert s.proven.epsilon > 1.5 * secret
    assert any(f"never learns who was drawn, epsilon = {at_most(secret)}; the proven number" in note for note in s.notes)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": "poisson"},
        {"cohort": 200},
        {"view": View.SERVER},
        {"min_survivors": 30},
        {"colluders": 2},
        {"training": {"local": "dp-sgd"}, "unit": Unit.RECORD},
    ],
)
def test_no_such_remark_where_it_would_not_hold(changes: dict[str, Any]) -> None:
    assert not any("drawn afresh" in note for note in certify(DPFedAvg(), setting(**changes), batch_norm=False).notes)


@pytest.mark.parametrize("rounds", [1, 16])
def test_correlated_noise_draws_clients_from_the_seed_and_gains_nothing(rounds: int) -> None:
    s = certify(BandedMF(separation=4), setting(rounds=rounds), batch_norm=False)
    assert s.proven.epsilon < math.inf
    assert not any("drawn afresh" in note for note in s.notes)


# --- users with several records ----------------------------------------------------------------------------------------------


def test_users_with_several_records_are_priced_under_dp_sgd() -> None:
    s = setting(training={"local": "dp-sgd"}, unit=Unit.RECORD)
    step = FedAvg().releases(s, View.AGGREGATE)[0]
    assert isinstance(step, SampledGaussian)
    two, ten = (
        bound([UserRecordsGaussian(k, step.rate, step.noise_multiplier, step.count)], 1e-5, adjacency=ZERO)[0] for k in (2, 10)
    )
    found = certify(FedAvg(), s)
    assert found.proven.epsilon < two < ten
    line = f"protected less: epsilon = {at_most(two)} with 2 records, {at_most(ten)} with 10 records (at delta = 1e-5)"
    assert any(line in note for note in found.notes)


def test_no_line_on_several_records_without_records() -> None:
    record = {"training": {"local": "dp-sgd"}, "unit": Unit.RECORD}
    for s in (setting(), setting(unit=Unit.RECORD), setting(**record, adjacency=REPLACE), setting(**record, records=1)):
        assert not any("several records" in note for note in certify(DPFedAvg(), s).notes)
    few = certify(DPFedAvg(), setting(**record, records=5))
    assert any("with 2 records (at" in note for note in few.notes)
