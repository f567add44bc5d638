"""What the noise sampler adds to delta: by hand, included in the quoted number, and said where it cannot be."""

from __future__ import annotations

import math

import pytest

import method_kit as h
from fedveil.accounting.accountant import bound, delta_bound
from fedveil.accounting.finite_precision import total_variation
from fedveil.accounting.types import Adjacency, Gaussian, Unit, View
from fedveil.experiment.certify import certify
from fedveil.methods.adaptive_clipping import AdaptiveClipping
from fedveil.methods.fedavg import DPFedAvg, FedAvg
from fedveil.methods.run_cost import charged_bound, run_variation
from fedveil.statement.caveats import ideal_noise

ZERO = Adjacency.ZERO_OUT
LAYERS = {"w": (1000, 61), "b": (706,)}


def test_every_draw_of_a_run_counts() -> None:
    s = h.setting(View.AGGREGATE, LAYERS)
    assert run_variation(DPFedAvg(), s) == pytest.approx(4 * 20 * total_variation(61_706), rel=1e-12)
    poisson = h.setting(View.AGGREGATE, LAYERS, sampling="poisson")
    assert run_variation(DPFedAvg(), poisson) == pytest.approx(10 * 20 * total_variation(61_706), rel=1e-12)
    dp_sgd = h.setting(View.AGGREGATE, LAYERS, training={"local": "dp-sgd"}, unit=Unit.RECORD)
    assert dp_sgd.steps == 4
    assert run_variation(FedAvg(), dp_sgd) == pytest.approx(4 * 20 * 4 * total_variation(61_706), rel=1e-12)
    more = run_variation(AdaptiveClipping(), s)
    assert more == pytest.approx(4 * 20 * total_variation(61_707), rel=1e-12)
    assert more > run_variation(DPFedAvg(), s)


def test_the_statement_prints_it() -> None:
    s = certify(DPFedAvg(), h.setting(View.AGGREGATE, LAYERS))
    variation = run_variation(DPFedAvg(), h.setting(View.AGGREGATE, LAYERS))
    added = variation * (1 + math.exp(s.proven.epsilon))
    assert added < 1e-15 * s.delta
    assert s.notes[-1] == (
        f"the noise sampler is within total variation {variation:.2g} of ideal Gaussian noise over the whole run; that adds "
        f"{added:.2g} to delta, which delta = 1e-3 includes"
    )
    bare = certify(DPFedAvg(), h.setting(View.AGGREGATE, noise_multiplier=0.0))
    assert not any("sampler" in note for note in bare.notes), "nothing is proven"


@pytest.mark.parametrize("variation", [0.0, 1e-30, 1e-16, 1e-9])
def test_what_is_added_is_paid_for(variation: float) -> None:
    """Epsilon for real noise: the delta of ideal noise there, and what the sampler adds, stay within delta together."""
    events, delta = [Gaussian(0.9)], 1e-5
    ideal, _ = bound(events, delta)
    epsilon, _ = charged_bound(events, delta, variation, ZERO)
    spent = delta_bound(events, epsilon)[0] + variation * (1 + math.exp(epsilon))
    assert spent <= delta * (1 + 1e-12)
    assert epsilon == pytest.approx(ideal, rel=1e-3)
    assert (epsilon > ideal) is (variation in (1e-16, 1e-9))


def test_one_per_cent_of_delta_is_too_much_to_include() -> None:
    events, delta = [Gaussian(0.9)], 1e-5
    ideal = bound(events, delta)
    limit = 0.01 * delta / (1 + math.exp(ideal[0]))
    assert charged_bound(events, delta, 1.01 * limit, ZERO) == ideal
    assert ideal_noise(1.01 * limit, ideal[0], delta)
    assert not ideal_noise(0.99 * limit, ideal[0], delta)


def test_where_the_sampler_adds_too_much_ideal_noise_is_assumed() -> None:
    """At epsilon = 92 even 1e-27 counts: no delta can include it, and the statement says so instead."""
    noisy, bare = (certify(DPFedAvg(), h.setting(View.AGGREGATE, LAYERS, noise_multiplier=z)) for z in (2.0, 0.4))
    assert bare.proven.epsilon > 60
    assert any(text.startswith("the noise sampler is ideal, not only within") for text in bare.proven.assumptions)
    assert not any("sampler" in note for note in bare.notes)
    assert not any("sampler" in text for text in noisy.proven.assumptions)
