"""privacy.js, claims.js and families.js against reference values and fedveil.accounting, to 1e-6 relative or better."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedveil.accounting import accountant, gaussian, last_iterate, subsampled
from fedveil.accounting.learnability import HALF, HARDLY, LEARNS, POWER, expected_share, gathered_ratio, verdict_of
from fedveil.accounting.types import Adjacency, Gaussian, SampledGaussian, Unbounded, Unit, View
from fedveil.methods.method_registry import METHODS, method_from
from fedveil.methods.setting import Setting
from fedveil.papers.aldp_fl import claim as truncated
from fedveil.papers.convergent_dp import claim as noisy_fedavg
from fedveil.papers.convergent_dp.claim import StepRates
from fedveil.papers.fedanc import method as fedanc
from fedveil.papers.fedglp_adp import claim as baselines
from fedveil.papers.fedglp_adp import claim as fedglp
from fedveil.papers.fedglp_adp.claim import opacus_epsilon
from fedveil.papers.ladp_fl import claim as ladp
from fedveil.registry import registered_files
from fedveil.report.explorer import explorer_methods, explorer_values
from fedveil.report.web_page import web_file
from method_kit import setting as run_setting

ORACLES = Path(__file__).parents[1] / "accounting" / "oracles.json"
START: dict[str, Any] = {
    "family": "dp-fedavg",
    "view": "aggregate",
    "unit": "client",
    "adjacency": "replace_one",
    "sampling": "fixed",
    "schedule": "constant",
    "project": "no",
    "delta": 1e-06,
    "density": 0.3,
    "eta": 0.5,
    "diameter": 0.1,
    "clients": 1000,
    "cohort": 100,
    "rounds": 50,
    "noise": 3.0,
    "clip": 0.7,
    "dim": 20000,
    "records": 400,
    "batch": 40,
    "steps": 6,
    "lr": 0.05,
    "smooth": 2.0,
    "prox": 3.0,
}
PROJECTED: dict[str, Any] = {"family": "noisy-fedavg", "view": "final", "project": "yes", "adjacency": "zero_out", "cohort": 1}
Ask = Callable[[str], Any]


ANSWER = """
const { createInterface } = require("readline"), { runInThisContext } = require("vm");
const { parts, data } = JSON.parse(process.argv[1]);
globalThis.veilPage = { data };
parts.forEach((part) => runInThisContext(part));
globalThis.V = veilPrivacy; globalThis.C = veilClaims; globalThis.F = veilFamilies; globalThis.W = veilWords;
const plain = (key, value) => (value === Infinity ? "Infinity" : value);
createInterface({ input: process.stdin }).on("line", (line) => console.log(JSON.stringify(runInThisContext(line), plain)));
"""
PARTS = ("chart.js", "privacy.js", "claims.js", "families.js", "words.js")


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Evaluates an expression of V, C, F and W, the page's scripts, in Node.js; infinities come back as floats."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js: no node on PATH")
    inputs = json.dumps({"parts": [web_file(part) for part in PARTS], "data": explorer_values()})
    with subprocess.Popen([node, "-e", ANSWER, inputs], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def asking(expression: str) -> Any:
            print(f"({expression})", file=process.stdin, flush=True)
            value = json.loads(process.stdout.readline())
            return math.inf if value == "Infinity" else value

        yield asking
        process.stdin.close()


def setting(**changes: Any) -> str:
    return json.dumps({**START, **changes})


def close(answer: float, wanted: float, rel: float = 1e-9) -> None:
    assert answer == pytest.approx(wanted, rel=rel, abs=1e-300)


def _const(rho: float, gamma: float, rounds: int, diameter: float) -> str:
    p = setting(**PROJECTED, steps=1, smooth=1.0, lr=rho - 1, clip=gamma, noise=1 / gamma, diameter=diameter)
    return f"F.projectedMu({p}, {rounds}, undefined, 0)"


ORACLE_CALLS = {
    "gdp_delta(mu=1, eps=1)": "Math.exp(V.logDelta(1, 1))",
    "gdp_delta(mu=0.5, eps=1)": "Math.exp(V.logDelta(0.5, 1))",
    "gdp_delta(mu=3, eps=10)": "Math.exp(V.logDelta(3, 10))",
    "gdp_delta(mu=0.1, eps=0.5)": "Math.exp(V.logDelta(0.1, 0.5))",
    "gdp_eps(mu=1, delta=1e-05)": "V.epsilon(1, 1e-5)",
    "gdp_eps(mu=0.5, delta=1e-05)": "V.epsilon(0.5, 1e-5)",
    "gdp_eps(mu=10, delta=1e-05)": "V.epsilon(10, 1e-5)",
    "gdp_eps(mu=0.1, delta=1e-05)": "V.epsilon(0.1, 1e-5)",
    "gdp_tpr(mu=1, fpr=0.05)": "V.tpr(1, 0.05)",
    "sqrt(H0_paper(rho=1.61051, T=600))  [claimed, in units of gamma sqrt(m)/sigma]": "C.shiftedH0(1.61051, 600)",
    "sqrt(H0_paper(rho=2, T=10))  [claimed, in units of gamma sqrt(m)/sigma]": "C.shiftedH0(2, 10)",
    "sqrt(si_last_iterate_const(rho=1.05, gamma=0.01, T=1000, D=1.0))": _const(1.05, 0.01, 1000, 1.0),
    "sqrt(si_last_iterate_const(rho=1.05, gamma=0.01, T=2000, D=1.0))": _const(1.05, 0.01, 2000, 1.0),
    "sqrt(si_last_iterate_const(rho=1.2, gamma=0.3, T=12, D=2.0))": _const(1.2, 0.3, 12, 2.0),
    "claimed eps, T=40, sigma=.3, delta=.1": "C.zcdp(40 / (2 * 0.3 ** 2), 0.1)",
    "claimed eps d=44426 gamma=0.5 beta=0.5 delta=1e-5": "Math.sqrt(44426 * 0.5) * C.classical(0.5, 1e-5)",
    "exact eps(1e-5), fixed mask, replace, beta=.5: gdp_eps(4,1e-5)": "V.epsilon(4, 1e-5)",
    "tn_delta_inf(sigma=0.3, b=1.0, shift=0.3)": "C.truncatedFloor(0.3, 1, 0.3)",
    "tn_delta_inf(sigma=2.0, b=1.0, shift=1.5)": "C.truncatedFloor(2, 1, 1.5)",
    "rdp_sgm_int(q=0.01, noise_mult=1.0, alpha=8)": "V.rdp(0.01, 1, 'zero_out')[6]",
    "rdp_sgm_int(q=0.1, noise_mult=1.0, alpha=3)": "V.rdp(0.1, 1, 'zero_out')[1]",
    "rdp_sgm_int(q=0.01, noise_mult=0.8, alpha=2)": "V.rdp(0.01, 0.8, 'zero_out')[0]",
    "eps(1e-5) of 1000 SGM steps q=.01 z=1, integer alpha in 2..199, CKS": "V.epsilonRdp(0.01, 1, 1000, 1e-5, 'zero_out')",
}


def test_every_reference_value_that_the_page_can_compute(ask: Ask) -> None:
    values = {row["expr"]: float(row["value"]) for row in json.loads(ORACLES.read_text())}
    answers = ask("[" + ", ".join(ORACLE_CALLS.values()) + "]")
    for (name, _), value in zip(ORACLE_CALLS.items(), answers, strict=True):
        assert value == pytest.approx(values[name], rel=1e-9), name


def test_gaussian_curve_over_the_whole_range(ask: Ask) -> None:
    mus = [1e-6, 1e-3, 0.1, 0.9999, 1.0001, 3, 30, 1000]
    deltas = [1e-300, 1e-100, 1e-12, 1e-5, 0.3]
    epsilons = [0, 0.01, 1, 30, 500]
    answers = ask(f"{mus}.map((m) => [{deltas}.map((d) => V.epsilon(m, d)), {epsilons}.map((e) => V.logDelta(m, e))])")
    for mu, (eps, logs) in zip(mus, answers, strict=True):
        for delta, value in zip(deltas, eps, strict=True):
            close(value, gaussian.epsilon_of(mu, delta))
        for epsilon, value in zip(epsilons, logs, strict=True):
            close(value, gaussian.log_delta_of(mu, epsilon))


def test_trade_off(ask: Ask) -> None:
    for mu, fpr in ((0.1, 1e-9), (1, 0.05), (3, 0.7)):
        close(ask(f"V.tpr({mu}, {fpr})"), gaussian.tpr(mu, fpr))


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_poisson_sampling_equals_the_reference_at_the_same_orders(ask: Ask, adjacency: Adjacency) -> None:
    orders = ask("V.ORDERS")
    for rate, z in ((1e-4, 0.5), (0.01, 1.0), (0.1, 3.0), (0.5, 0.7), (0.9, 20.0)):
        wanted = subsampled.rdp(rate, z, orders, adjacency=adjacency)
        np.testing.assert_allclose(ask(f"V.rdp({rate}, {z}, '{adjacency}')"), wanted, rtol=1e-8)
        epsilon = subsampled.epsilon_rdp(rate, z, 500, 1e-6, orders=orders, adjacency=adjacency)
        close(ask(f"V.epsilonRdp({rate}, {z}, 500, 1e-6, '{adjacency}')"), epsilon, 1e-8)


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_composition_over_a_grid(ask: Ask, adjacency: Adjacency) -> None:
    """Runs of one to 10,000 releases, sampled and not, at three deltas."""
    grid = list(product((1e-3, 0.05, 0.5, 1.0), (0.6, 2.0, 10.0), (1, 30, 10_000), (1e-9, 1e-5, 1e-2)))
    calls = [
        f"V.runEpsilon({{mu: {math.sqrt(t) / z}, sampled: {{rate: {q}, multiplier: {z}, count: {t}}}}}, {d}, '{adjacency}')"
        for q, z, t, d in grid
    ]
    orders = ask("V.ORDERS")
    for (q, z, t, d), value in zip(grid, ask(f"[{', '.join(calls)}]"), strict=True):
        renyi = subsampled.epsilon_rdp(q, z, t, d, orders=orders, adjacency=adjacency)
        close(value, min(renyi, gaussian.epsilon_of(math.sqrt(t) / z, d)), 1e-8)


def test_every_claim_has_its_formula_and_its_scope(ask: Ask) -> None:
    methods = explorer_methods()
    assert {"silo-dp-sgd", "dp-fedavg", *registered_files("notes/*.toml")} <= set(methods) <= {*METHODS, "silo-dp-sgd"}
    assert not {"fedavg", "banded-mf"} & set(methods), "what adds no noise, or correlated noise"
    assert set(ask("Object.keys(C.CLAIMS)")) == {name for name, method in methods.items() if method["claim"]}
    for name, method in methods.items():
        assert method["refuted"] or not method["claim"], name
    ours = METHODS["aldp-fl"](variant="published")
    claim = ours.claim(_setting(View.SERVER, "fixed", Adjacency.REPLACE_ONE, epsilon=1.0))
    assert claim is not None
    scope = {"unit": claim.scope.unit, "adjacency": claim.scope.adjacency, "view": claim.scope.view}
    assert scope.items() <= methods["aldp-fl"]["claim"].items()


SAID = """(() => {
  const said = [], families = Object.keys(F.FAMILIES);
  for (const family of families) for (const view of F.VIEWS) for (const unit of ["client", "record"])
    for (const adjacency of ["zero_out", "replace_one"]) {
      const choice = {family, view, unit, adjacency}, p = {...START, ...choice}, claim = F.claim(p);
      const text = claim && Number.isFinite(claim.epsilon) && W.besideProof(p, F.proven(p), claim);
      if (text) said.push([choice, F.FAMILIES[family].claim, text]);
    }
  return said;
})()"""


def test_the_headline_compares_a_claim_with_a_proof_of_the_same_only(ask: Ask) -> None:
    """A claim for another view, unit or adjacency is said to be one, and no ratio is given."""
    said = ask(" ".join(SAID.replace("START", setting(batch=400, rounds=1)).split()))
    assert len(said) == 10 * 3 * 2 * 2
    compared = 0
    for choice, claim, text in said:
        others = [kind for kind in ("view", "unit", "adjacency") if choice[kind] != claim[kind]]
        for kind in others:
            theirs, ours = (name.replace("_", "-") for name in (claim[kind], choice[kind]))
            assert f"another {kind} ({theirs}, not {ours})" in text
        assert bool(re.search("times|agrees|no proof", text)) == (not others), text
        compared += not others
    assert compared == 10


def test_the_headline_names_another_delta(ask: Ask) -> None:
    p = setting(family="ladp-fl", view="server", unit="record", adjacency="zero_out", batch=400, rounds=1)
    assert "times" in ask(f"W.besideProof({p}, 1, F.claim({p}))")
    p = setting(family="ladp-fl", view="server", unit="record", adjacency="zero_out", batch=400, rounds=10)
    assert "another δ (10⁻⁵, not 10⁻⁶)" in ask(f"W.besideProof({p}, 1, F.claim({p}))")


def test_claims_equal_the_published_formulas(ask: Ask) -> None:
    z, n, t, d = START["noise"], START["cohort"], START["rounds"], START["delta"]

    def claimed(**changes: Any) -> float:
        return float(ask(f"F.claim({setting(**changes)}).epsilon"))

    close(claimed(family="fedglp-adp"), fedglp.claimed_epsilon(z, t, d))
    close(claimed(family="fedglp-adp", view="server"), fedglp.claimed_epsilon(z * math.sqrt(n), t, d))
    root, sampled = math.sqrt(n), {"rate": 0.1}
    close(claimed(family="blur-lus"), opacus_epsilon(z, t, d, **sampled), 0.02)  # Opacus has broken orders as well
    rate, steps = baselines.record_steps(40, 1000 * 400, t, 6 * 40 / 400, 0.1)
    page = {"orders": ask("V.ORDERS"), "adjacency": Adjacency.ZERO_OUT}  # Opacus has none above 63
    close(claimed(family="fed-dpa"), subsampled.epsilon_rdp(rate, z, round(steps), d, **page), 1e-8)
    close(baselines.fedaddp_noise(claimed(family="fed-addp", view="server"), t, d), z, 1e-6)
    close(claimed(family="fed-smp"), baselines.fedsmp_epsilon(z, t, d, **sampled))
    close(claimed(family="fed-smp", view="server"), baselines.fedsmp_epsilon(z * root, t, d, **sampled))
    close(claimed(family="fedanc", view="server"), fedanc.claimed_epsilon(z, 0.3, 20000, d) * math.sqrt(t))
    per_round = math.sqrt(2 * math.log(1.25 / d)) / (z / 2)  # noise std over sensitivity 2C
    close(claimed(family="ladp-fl", view="server"), ladp.claimed_total(per_round, d, t, 0.1)[0])
    close(truncated.claimed_std(claimed(family="aldp-fl", view="server"), d, 2 * 0.7 / 400), z * 0.7)
    batch_clip = 0.7 / (0.05 * 6)
    shared: dict[str, Any] = {
        "clip": batch_clip,
        "smoothness": 2.0,
        "rounds": t,
        "clients": n,
        "noise_std": z * 0.7 / math.sqrt(n - 1),  # what a sum hides from a fellow client is z
    }
    for name, schedule in (("constant", StepRates.CONSTANT), ("stage", StepRates.STAGE_WISE)):
        mu = noisy_fedavg.FedAvgClaim(schedule, learning_rate=0.05, steps=6, **shared).mu
        close(claimed(family="noisy-fedavg", schedule=name), gaussian.epsilon_of(mu, d))
    travel = last_iterate.shift([0.05] * 6, 1.0, 1, proximal=3.0, adjacency=Adjacency.ZERO_OUT)
    mu = noisy_fedavg.claim_fedprox(**{**shared, "clip": 0.7 / travel}, proximal=3.0)
    close(claimed(family="noisy-fedprox"), gaussian.epsilon_of(mu, d))
    assert ask(f"F.claim({setting(family='noisy-fedprox', prox=1.5)}).why") == "the theorem needs α > L"


def test_linear_losses_exceed_the_claim_and_meet_the_proof(ask: Ask) -> None:
    p = setting(family="noisy-fedavg")
    claimed, proven, attained = ask(f"[F.claim({p}).epsilon, F.proven({p}), F.isAttained({p}) && F.attained({p}, 50)]")
    shifts = [last_iterate.shift([0.05] * 6, 0.7 / 0.3, 100)] * 50
    mu = noisy_fedavg.linear_loss_mu(shifts, 100, 3.0 * 0.7 / math.sqrt(99))
    close(attained, gaussian.epsilon_of(mu, 1e-6))
    close(proven, gaussian.epsilon_of(mu * math.sqrt(100 / 99), 1e-6))  # a fellow client knows one noise of a hundred
    assert claimed < 0.5 * attained


@pytest.mark.parametrize("family", ["noisy-fedavg", "noisy-fedprox"])
def test_projected_last_model_equals_the_reference(ask: Ask, family: str) -> None:
    for rounds, diameter, smooth in ((1, 0.1, 2.0), (400, 0.02, 0.1), (4000, 0.3, 0.01)):
        alpha = 3.0 if family == "noisy-fedprox" else 0.0
        rho = last_iterate.lipschitz([0.05] * 6, smooth, proximal=alpha)
        grid = 2.0 ** (math.floor(math.log2(3.0 * 0.7 / 10)) - 24) * math.sqrt(20_000)  # of an upload
        gamma, std = 2 * 0.7 / 100, 3.0 * 0.7 / 100
        last = last_iterate.final_mu_constant(rho, gamma + grid * 1.01 + diameter / 2**20, rounds, diameter, std)
        wanted = min(last, math.sqrt(rounds * 100 / 99) * gamma / std)  # composed, a fellow client knows one noise
        p = setting(family=family, view="final", project="yes", rounds=rounds, diameter=diameter, smooth=smooth)
        close(ask(f"F.projectedMu({p}, {rounds})"), wanted)
        close(ask(f"F.proven({p})"), gaussian.epsilon_of(wanted, 1e-6))


def _setting(
    view: View,
    sampling: str,
    adjacency: Adjacency,
    unit: Unit = Unit.CLIENT,
    example_clip: float | None = None,
    epsilon: float | None = None,
) -> Setting:
    training: dict[str, Any] = {"local_steps": 6, "batch_size": 40, "batch_clip": 0.7 / 0.3, "optimizer": {"lr": 0.05}}
    if example_clip is not None:
        training |= {"local": "dp-sgd", "example_clip": example_clip}
    public: dict[str, Any] = {
        "clients": 1000,
        "cohort": 100,
        "rounds": 50,
        "records": 400,
        "delta": 1e-6,
        "noise_multiplier": 3.0,
    }
    private: dict[str, Any] = {"unit": unit, "adjacency": adjacency, "epsilon": epsilon}
    return run_setting(view, {"w": (20000,)}, training=training, sampling=sampling, **public, **private)


IN_SHARES = {"noisy-fedavg", "noisy-fedprox"}
NAMES = sorted({*explorer_methods()} - {"silo-dp-sgd"})
RUNS = [(name, s) for name in NAMES for s in ("fixed", "poisson")[: 1 + (name not in IN_SHARES)]] + [("silo-dp-sgd", "fixed")]


@pytest.mark.parametrize(("family", "sampling"), RUNS)
def test_releases_and_proven_epsilon_equal_those_of_a_run(ask: Ask, family: str, sampling: str) -> None:
    """What the page counts is what fedveil's method counts, in every view of every run."""
    sgd = family == "silo-dp-sgd"
    unit = Unit.RECORD if sgd else Unit.CLIENT
    method = method_from({"name": "dp-fedavg" if sgd else family})
    for view, adjacency, seen in product(View, Adjacency, View):
        (event,) = method.releases(_setting(view, sampling, adjacency, unit, 1.0 if sgd else None), seen)
        clip = 1.0 if sgd else 0.7
        p = setting(family=family, view=view, sampling=sampling, adjacency=adjacency, unit=unit, clip=clip)
        shown, proven = ask(f"[F.event({p}, '{seen}'), F.proven({p}, 50, '{seen}')]")
        if isinstance(event, Unbounded):
            assert shown["reason"] == event.reason
            assert proven == "Infinity"
        elif isinstance(event, Gaussian):
            close(shown["mu"], event.mu)
            close(proven, gaussian.epsilon_of(event.mu * math.sqrt(event.count), 1e-6))
        else:
            assert isinstance(event, SampledGaussian)
            close(shown["rate"], event.rate)
            close(shown["multiplier"], event.noise_multiplier)
            assert shown["perRound"] * 50 == event.count
            best, _ = accountant.bound([event], 1e-6, adjacency=adjacency)
            assert best * (1 - 1e-9) <= proven <= 1.25 * best, "an upper bound, and not a loose one"


def test_one_record_of_a_clipped_update_costs_as_much_as_a_client(ask: Ask) -> None:
    record = ask(f"F.proven({setting(unit='record')})")
    close(record, ask(f"F.proven({setting(unit='client')})"))


def test_noise_norm_and_remedy(ask: Ask) -> None:
    close(ask(f"F.noiseRatio({setting()})"), 3 * math.sqrt(20000) / 100)
    close(ask(f"F.noiseRatio({setting(view='server')})"), 3 * math.sqrt(20000 / 100))
    close(ask(f"F.noiseRatio({setting(family='fedanc')})"), 3 * math.sqrt(6000) / 100)
    for view in ("server", "aggregate"):
        remedy = ask(f"F.remedy({setting(view=view)})")
        assert ask(f"F.noiseRatio({setting(view=view, cohort=remedy['cohort'])})") <= 1
        assert ask(f"F.noiseRatio({setting(view=view, cohort=remedy['cohort'] - 1)})") > 1
        if remedy["dim"]:
            assert ask(f"F.noiseRatio({setting(view=view, dim=remedy['dim'])})") <= 1 + 1e-12


@pytest.mark.parametrize(("family", "unit"), [("dp-fedavg", "client"), ("silo-dp-sgd", "record")])
def test_can_it_learn_is_answered_as_certify_does(ask: Ask, family: str, unit: str) -> None:
    """Over four orders of magnitude of noise, from yes to no, and at the edges of the rule."""
    seen = set()
    edge = [HALF * (1 / level - 1) ** (1 / POWER) * (1 + side) for level in (LEARNS, HARDLY) for side in (-1e-9, 1e-9)]
    for rounds, steps, view in product((1, 7, 300), (1, 6), ("server", "aggregate")):
        over = rounds * steps if unit == "record" else rounds
        shown = ask(f"F.noiseRatio({setting(family=family, unit=unit, noise=1.0, steps=steps, view=view)})")
        for gathered in (*(10 ** (k / 3) for k in range(-6, 7)), *edge):
            changes = {"noise": gathered * math.sqrt(over) / shown, "rounds": rounds, "steps": steps, "view": view}
            p = setting(family=family, unit=unit, **changes)
            ratio, together, share, verdict = ask(
                f"[F.noiseRatio({p}), F.gatheredRatio({p}), F.expectedShare(F.gatheredRatio({p})), F.verdict({p})]"
            )
            close(together, gathered_ratio(ratio, over))
            close(share, expected_share(together))
            assert verdict == verdict_of(ratio, over)
            seen.add(verdict)
    assert seen == {"yes", "perhaps", "no"}


def test_a_claim_of_another_view_is_not_beside_the_proof(ask: Ask) -> None:
    assert ask(f"F.sameView({setting(family='noisy-fedavg', view='final')})")
    assert not ask(f"F.sameView({setting(family='noisy-fedavg', view='aggregate')})")
    assert ask(f"F.sameView({setting(family='dp-fedavg')})"), "there is no claim"


def test_trade_off_of_sampled_releases_lies_between_guessing_and_the_unsampled_curve(ask: Ask) -> None:
    p = setting(sampling="poisson", adjacency="zero_out")
    sampled = ask(f"F.provenTradeoff({p}, [0.01, 0.05, 0.5])")
    mu = ask(f"F.plainMu({p}, F.event({p}, 'aggregate'), 50)")
    for fpr, rate in zip((0.01, 0.05, 0.5), sampled, strict=True):
        assert fpr < rate < gaussian.tpr(mu, fpr)


def test_calibration_meets_the_target_from_below(ask: Ask) -> None:
    for changes in ({}, {"sampling": "poisson"}, {"family": "silo-dp-sgd", "unit": "record"}):
        z = ask(f"F.calibrate({setting(**changes)}, 4)")
        close(ask(f"F.proven({setting(**changes, noise=z)})"), 4.0, 1e-6)
    assert ask(f"F.calibrate({setting(family='silo-dp-sgd')}, 4)") is None  # DP-SGD proves nothing about a client


@pytest.mark.parametrize("cohort", [2, 10])
def test_a_fellow_client_knows_its_own_share_on_the_page_too(ask: Ask, cohort: int) -> None:
    for view in ("aggregate", "final", "server"):
        p = setting(family="noisy-fedavg", view=view, cohort=cohort, adjacency="zero_out")
        scale = math.sqrt((cohort - 1) / cohort) if view == "final" else math.sqrt(cohort - 1) if view == "server" else 1.0
        close(ask(f"F.event({p}, 'aggregate').mu"), 1 / (3.0 * scale))
    alone = setting(family="noisy-fedavg", cohort=1)
    assert ask(f"F.proven({alone})") == math.inf
    assert "a fellow client knows the only noise" in ask(f"F.event({alone}, 'aggregate').reason")
    close(ask(f"F.event({setting(family='noisy-fedavg', cohort=1, view='server')}, 'aggregate').mu"), 2 / 3.0)
