"""Statements as values: what contradicts what, strict JSON, Markdown, and combinations that make no scope_checks."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fedveil.accounting.attack_power import exact_mu, largest_tpr, tpr_of
from fedveil.accounting.gaussian import delta_of
from fedveil.accounting.learnability import (
    Level,
    dimension_for,
    expected_share,
    gathered_ratio,
    multiplier_for,
    noise_norm,
    verdict_of,
)
from fedveil.accounting.subsampled import epsilon_pld
from fedveil.accounting.types import (
    Adjacency,
    Audit,
    Claim,
    Gaussian,
    Guarantee,
    SampledGaussian,
    Scope,
    Unbounded,
    Unit,
    View,
    percent_at_most,
)
from fedveil.errors import ConfigError
from fedveil.statement import scope_checks
from fedveil.statement.statement import SIMULATION_ONLY, VIEWS, Assumption, Statement, ViewNumbers, covers
from fedveil.statement.statement_layout import from_dict, to_dict, to_markdown
from fedveil.statement.statement_text import in_words

DELTA = 1e-5


def scope(view: View, unit: Unit = Unit.CLIENT, adjacency: Adjacency = Adjacency.ZERO_OUT) -> Scope:
    return Scope(unit, adjacency, view)


def statement(claimed: Claim | None = None, warnings: tuple[str, ...] = ()) -> Statement:
    server = Guarantee(math.inf, DELTA, scope(View.SERVER), "none", reason="uploads carry no noise")
    rest = [Guarantee(2.0, DELTA, scope(v), "gdp", ("noise is secret",)) for v in VIEWS[1:]]
    views = [ViewNumbers(server), *(ViewNumbers(g, mu=0.5, tpr=0.2) for g in rest)]
    if claimed is not None:
        views = [replace(v, claimed=claimed) if v.view is claimed.scope.view else v for v in views]
    return Statement(
        method="m",
        variant="published",
        scope=scope(View.AGGREGATE),
        delta=DELTA,
        target_epsilon=2.0,
        noise_multiplier=4.0,
        accountant="gdp",
        clients=100,
        cohort=10,
        rounds=3,
        sampling="fixed",
        dimension=1000,
        units=100,
        views=tuple(views),
        assumptions=(Assumption("noise is secret", "else it is subtracted"),),
        not_protected=("sizes",),
        warnings=warnings,
    )


def audit(epsilon: float, where: Scope, *, rigorous: bool = True, delta: float = DELTA) -> Audit:
    return Audit(epsilon, delta, where, "two worlds", 0.95, 1000, rigorous)


def claim(epsilon: float, where: Scope) -> Claim:
    return Claim(epsilon, DELTA, where, "a theorem")


# --- audits against claims and proofs -------------------------------------------------------------------------------------


def test_an_audit_below_the_proof_contradicts_nothing() -> None:
    s = statement(claim(1.0, scope(View.AGGREGATE))).with_audits([audit(0.9, scope(View.AGGREGATE))])
    assert s.contradictions() == ()
    assert s.own.audited is not None
    assert s.own.audited.epsilon == 0.9


def test_an_audit_between_claim_and_proof_refutes_the_claim_only() -> None:
    s = statement(claim(1.0, scope(View.AGGREGATE))).with_audits([audit(1.5, scope(View.AGGREGATE))])
    assert [(c.number, c.label) for c in s.contradictions()] == [("claimed", "REFUTED")]
    assert "REFUTED" in in_words(s)
    assert "**REFUTED**" in to_markdown(s)


def test_an_audit_above_the_proof_refutes_the_proof_of_its_own_view_and_of_stronger_ones() -> None:
    s = statement().with_audits([audit(2.5, scope(View.FINAL))])
    refuted = {c.against.scope.view for c in s.contradictions()}
    assert refuted == {View.AGGREGATE, View.FINAL}, "whoever sees more can do at least as well; inf is never refuted"
    stronger = statement().with_audits([audit(2.5, scope(View.AGGREGATE))])
    assert {c.against.scope.view for c in stronger.contradictions()} == {View.AGGREGATE}, "a weaker view stands"


def test_an_estimate_does_not_refute_and_the_most_telling_audit_is_shown() -> None:
    s = statement(claim(1.0, scope(View.AGGREGATE))).with_audits([audit(1.5, scope(View.AGGREGATE), rigorous=False)])
    assert [c.label for c in s.contradictions()] == ["IN DOUBT"]
    more = s.with_audits([audit(1.2, scope(View.AGGREGATE)), audit(1.1, scope(View.AGGREGATE))])
    assert more.own.audited is not None
    assert more.own.audited.epsilon == 1.2
    assert [c.label for c in more.contradictions()] == ["REFUTED"]


def test_an_audit_at_a_smaller_delta_or_a_stronger_relation_refutes_nothing() -> None:
    s = statement(claim(1.0, scope(View.AGGREGATE)))
    smaller = s.with_audits([audit(1.5, scope(View.AGGREGATE), delta=DELTA / 2)])
    assert smaller.contradictions() == ()
    replaced = s.with_audits([audit(9.0, scope(View.AGGREGATE, adjacency=Adjacency.REPLACE_ONE))])
    assert replaced.contradictions() == (), "zero-out promises nothing about replacing"
    structural = s.with_audits([audit(math.inf, scope(View.AGGREGATE), delta=0.5)])
    assert {c.number for c in structural.contradictions()} == {"claimed", "proven"}


def test_which_scopes_cover_which() -> None:
    client, record = scope(View.SERVER, adjacency=Adjacency.REPLACE_ONE), scope(View.FINAL, Unit.RECORD)
    assert covers(client, record)
    assert not covers(record, client)
    assert not covers(scope(View.SERVER), record), "client-level zero-out says nothing of one record"
    assert not covers(scope(View.SERVER), scope(View.SERVER, adjacency=Adjacency.REPLACE_ONE))
    assert [covers(scope(View.AGGREGATE), scope(v)) for v in VIEWS] == [False, True, True]


# --- plain values -------------------------------------------------------------------------------------------------------------


def test_json_is_strict_and_comes_back_equal() -> None:
    s = statement(claim(1.0, scope(View.FINAL, adjacency=Adjacency.REPLACE_ONE)), (SIMULATION_ONLY,)).with_audits(
        [audit(math.inf, scope(View.SERVER)), audit(0.5, scope(View.AGGREGATE))]
    )
    text = json.dumps(to_dict(s), allow_nan=False)
    assert from_dict(json.loads(text)) == s
    first = json.loads(text)["views"][0]
    assert first["proven"]["epsilon"] == "inf"
    assert first["proven"]["reason"] == "uploads carry no noise"
    assert first["proven"]["scope"] == {"unit": "client", "adjacency": "zero_out", "view": "server"}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format": "other/1"}, "format"),
        ({"delta": "tiny"}, "statement.delta"),
        ({"scope": {"unit": "house", "adjacency": "zero_out", "view": "final"}}, "house"),
        ({"surprise": 1}, "surprise"),
        ({"rounds": True}, "statement.rounds"),
        ({"views": []}, "server, aggregate and final"),
    ],
)
def test_damaged_values_are_refused_by_name(change: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(word)):
        from_dict({**to_dict(statement()), **change})
    values = to_dict(statement())
    del values["method"]
    with pytest.raises(ConfigError, match="method"):
        from_dict(values)


def test_a_statement_mixes_no_scopes() -> None:
    s = statement()
    alien = Guarantee(1.0, DELTA, scope(View.SERVER, Unit.RECORD), "gdp")
    with pytest.raises(ConfigError, match="share unit"):
        replace(s, views=(ViewNumbers(alien), *s.views[1:]))
    with pytest.raises(ConfigError, match="in this order"):
        replace(s, views=s.views[::-1])


def test_markdown_says_unit_adjacency_view_and_delta_beside_every_epsilon() -> None:
    text = to_markdown(statement(claim(1.0, scope(View.FINAL, adjacency=Adjacency.REPLACE_ONE)), (SIMULATION_ONLY,)))
    assert "- simulation only: noise is reproducible, no privacy\n" in text
    assert "delta = 1e-5, client level, zero-out" in text
    assert "1 at replace-one (a theorem)" in text
    assert "| server | - | inf: uploads carry no noise | -: fedveil audit RUN | 100 % |" in text
    for place in re.finditer(r"epsilon = \S+", text):
        following = text[place.start() : place.start() + 110]
        assert all(word in following for word in ("delta = 1e-5", "client level", "zero-out", "view")), following


# --- what an attacker can do ----------------------------------------------------------------------------------------------------


def test_tpr_of_plain_gaussians_is_the_exact_trade_off() -> None:
    events = [Gaussian(0.3, 4), Gaussian(0.8), SampledGaussian(1.0, 2.0, 2)]
    mu = math.sqrt(4 * 0.09 + 0.64 + 0.5)
    assert exact_mu(events) == pytest.approx(mu, rel=1e-12)
    assert largest_tpr(events, 9.9, DELTA, 0.05) == pytest.approx(norm.cdf(norm.ppf(0.05) + mu), rel=1e-12)
    assert exact_mu([SampledGaussian(0.1, 1.0)]) is None
    assert largest_tpr([Unbounded("why")], math.inf, DELTA, 0.05) == 1.0


def test_tpr_of_epsilon_delta_by_hand() -> None:
    assert tpr_of(math.log(2), 0.01, 0.05) == pytest.approx(2 * 0.05 + 0.01)
    assert tpr_of(math.log(8), 0.01, 0.5) == pytest.approx(1 - (1 - 0.01 - 0.5) / 8)
    assert tpr_of(0.0, 0.0, 0.05) == 0.05
    assert tpr_of(800.0, 0.0, 0.05) == 1.0


@given(mu=st.floats(0.05, 4), fpr=st.floats(0.001, 0.5))
def test_tpr_of_any_point_of_the_curve_bounds_the_exact_one(mu: float, fpr: float) -> None:
    exact = float(norm.cdf(norm.ppf(fpr) + mu))
    for epsilon in (0.0, 0.3, 1.0, 3.0):
        assert tpr_of(epsilon, delta_of(mu, epsilon), fpr) >= exact - 1e-9


@settings(deadline=None, max_examples=10)
@given(rate=st.floats(0.02, 0.5), z=st.floats(0.7, 3), rounds=st.integers(1, 200))
def test_tpr_of_sampled_releases_lies_between_one_test_and_no_sampling(rate: float, z: float, rounds: int) -> None:
    events = [SampledGaussian(rate, z, rounds)]
    epsilon = epsilon_pld(rate, z, rounds, DELTA, adjacency=Adjacency.ZERO_OUT)
    given_rate = largest_tpr(events, epsilon, DELTA, 0.05, adjacency=Adjacency.ZERO_OUT)
    assert given_rate <= norm.cdf(norm.ppf(0.05) + math.sqrt(rounds) / z) + 1e-12
    threshold = z * norm.ppf(0.95)
    one_look = (1 - rate) * 0.05 + rate * norm.sf((threshold - 1) / z)
    assert given_rate >= one_look - 1e-9, "looking at the first round alone already does as well"


def test_percentages_round_up() -> None:
    assert percent_at_most(0.20001) == "20.1 %"
    assert percent_at_most(0.2) == "20.0 %"
    assert percent_at_most(1.0) == "100 %"
    assert percent_at_most(0.99999) == "99.999 %"
    assert float(percent_at_most(0.999996).split()[0]) >= 99.9996


# --- noise against signal -----------------------------------------------------------------------------------------------------


def test_noise_norm_by_hand_and_its_inverses() -> None:
    assert noise_norm(1.5 * 2.0, 400, 50, on_sum=True) == pytest.approx(1.5 * 2 * 20 / 50)
    assert noise_norm(1.5 * 2.0, 400, 100, on_sum=False) == pytest.approx(1.5 * 2 * math.sqrt(400 / 100))
    for on_sum in (True, False):
        z = multiplier_for(0.7, 400, 50, on_sum=on_sum)
        assert noise_norm(z, 400, 50, on_sum=on_sum) == pytest.approx(0.7)
        d = dimension_for(0.7, 1.3, 50, on_sum=on_sum)
        assert noise_norm(1.3, d, 50, on_sum=on_sum) <= 0.7 < noise_norm(1.3, d + 1, 50, on_sum=on_sum)


def test_verdicts() -> None:
    """By what 16 rounds leave of the noise: R = ratio / 4."""
    assert [verdict_of(4 * r, 16) for r in (0.1, 0.67, 0.7, 2.9, 3.1)] == ["yes", "yes", "perhaps", "perhaps", "no"]
    assert [verdict_of(4.0, rounds) for rounds in (1, 2, 100)] == ["no", "perhaps", "yes"]
    assert Level(View.SERVER, note="why").ratio is None


def test_the_expected_share_is_close_to_what_was_measured() -> None:
    """The runs of benchmarks/learnability.py: a root mean square error of at most 7 points, and not by a constant."""
    runs = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "learnability.json").read_text())
    noisy = [(float(level), (r - 0.1) / (row["0"] - 0.1)) for row in runs.values() for level, r in row.items()]
    measured = [(level, share) for level, share in noisy if level]
    assert len(measured) >= 30
    errors = [expected_share(level) - share for level, share in measured]
    assert math.sqrt(statistics.fmean(e * e for e in errors)) < 0.07
    assert statistics.pstdev(share for _, share in measured) > 0.14
    assert gathered_ratio(6.0, 9) == pytest.approx(2.0)
    assert expected_share(0.0) == 1.0


# --- combinations that make no sense --------------------------------------------------------------------------------------------


def credit(view: View, unit: Unit = Unit.CLIENT, **other: bool | float) -> None:
    how = {"poisson": True, "rate": 0.1, "records_sampled": False, "noise_in_shares": False, **other}
    scope_checks.check_sampling_credit([SampledGaussian(0.1, 1.0, 5)], scope(view, unit), **how)  # type: ignore[arg-type]


def test_amplification_is_credited_only_where_the_sample_is_secret_and_poisson() -> None:
    credit(View.AGGREGATE)
    credit(View.FINAL)
    credit(View.SERVER, Unit.RECORD, records_sampled=True)
    refused: list[tuple[str, View, dict[str, bool | float]]] = [
        ("server view", View.SERVER, {}),
        ("server view", View.SERVER, {"records_sampled": True}),
        ("fixed numbers", View.AGGREGATE, {"poisson": False}),
        ("tells how many took part", View.AGGREGATE, {"noise_in_shares": True}),
        ("joins with probability 0.2", View.FINAL, {"rate": 0.2}),
    ]
    for word, view, how in refused:
        with pytest.raises(ConfigError, match=word):
            credit(view, **how)
    scope_checks.check_sampling_credit(
        [SampledGaussian(1.0, 1.0), Gaussian(1.0)],
        scope(View.SERVER),
        poisson=False,
        rate=1.0,
        records_sampled=False,
        noise_in_shares=True,
    )


def test_noise_in_shares_betrays_participation() -> None:
    """One client, rate 1/2, noise of its own: its taking part is seen, so half of delta(epsilon) remains at full epsilon."""
    z, epsilon = 1.0, 3.0
    truth = 0.5 * delta_of(1 / z, epsilon)
    credited = epsilon_pld(0.5, z, 1, truth, adjacency=Adjacency.ZERO_OUT)
    assert credited < 0.9 * epsilon, "crediting the sampled Gaussian would promise too much"


def test_vacuous_deltas_are_refused_unless_allowed() -> None:
    with pytest.raises(ConfigError, match=r"not below 1 / 100 .* publishing one client"):
        scope_checks.check_delta(0.01, 100, Unit.CLIENT, allow_vacuous_delta=False)
    scope_checks.check_delta(0.01, 100, Unit.CLIENT, allow_vacuous_delta=True)
    scope_checks.check_delta(0.0099, 100, Unit.CLIENT, allow_vacuous_delta=False)
    assert scope_checks.is_vacuous(0.1, 10)
    assert not scope_checks.is_vacuous(1e-9, 10)


def test_a_record_moves_a_clipped_update_as_replacing_does_and_a_clipped_gradient_as_zeroing_does() -> None:
    record, client = scope(View.FINAL, Unit.RECORD), scope(View.FINAL)
    assert scope_checks.neighbouring_pair(record, per_example=False) is Adjacency.REPLACE_ONE
    assert scope_checks.neighbouring_pair(record, per_example=True) is Adjacency.ZERO_OUT
    assert scope_checks.neighbouring_pair(client, per_example=False) is Adjacency.ZERO_OUT
    swapped = scope(View.FINAL, Unit.RECORD, Adjacency.REPLACE_ONE)
    assert scope_checks.neighbouring_pair(swapped, per_example=True) is Adjacency.REPLACE_ONE
