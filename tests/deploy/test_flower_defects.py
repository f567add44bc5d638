"""What Flower's own differential privacy does wrong, each shown on the installed version; docs/coming-from-flower.md lists them.

When Flower mends one of these, its test fails here: then the page loses a row, and the test goes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flwr (pip install 'fedveil[flower]')")

from flwr.app import ArrayRecord, ConfigRecord, Error, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
)

from flower_apps import AppGrid, added, answer, arrays, context, instruction, model

FLOATS = arrays(w=np.zeros((2, 3), np.float32), v=np.zeros(4, np.float32))
QUIET = LocalDpMod(clipping_norm=1.0, sensitivity=1e-9, epsilon=1.0, delta=1e-5)
"""Clips to 1, and adds next to no noise."""


def wrapped(noise: float = 0.0, clients: int = 2, strategy: Any = None) -> DifferentialPrivacyServerSideFixedClipping:
    return DifferentialPrivacyServerSideFixedClipping(strategy or FedAvg(), noise, 1.0, clients)


def train(record: ArrayRecord, step: float, **metrics: Any) -> Message:
    found = {name: a.numpy() + np.asarray(step, a.numpy().dtype) for name, a in record.items()}
    return answer(instruction(record), arrays(**found), **metrics)


def aggregated(strategy: Any, record: ArrayRecord, *found: Message) -> Any:
    strategy.configure_train(1, record, ConfigRecord(), AppGrid(ClientApp(), 2))
    stepped = strategy.aggregate_train(1, found)[0]
    return None if stepped is None else {name: array.numpy() for name, array in stepped.items()}


def test_a_number_is_not_clipped_at_the_server() -> None:
    record = arrays(b=np.float32(0.0))
    assert aggregated(wrapped(), record, train(record, 100.0), train(record, 100.0))["b"] == 100.0


def test_a_number_is_not_clipped_at_the_client() -> None:
    record = arrays(b=np.float32(0.0))
    reply = QUIET(instruction(record), context(), added(100.0))
    assert reply.content["arrays"]["b"].numpy() == pytest.approx(100.0, abs=1e-3)


def test_a_client_with_many_examples_moves_the_model_by_the_whole_clip() -> None:
    """The noise is z C / n for a mean in which each client counts 1 / n."""
    many, one = train(FLOATS, 1.0, **{"num-examples": 10**6}), train(FLOATS, 0.0001, **{"num-examples": 1})
    found = aggregated(wrapped(), FLOATS, many, one)
    moved = math.sqrt(sum(float((a**2).sum()) for a in found.values()))
    assert moved > 0.99  # 0.5 is what the noise is for


def test_an_update_of_zero_ends_the_run() -> None:
    with pytest.raises(ZeroDivisionError):
        aggregated(wrapped(), FLOATS, train(FLOATS, 0.0), train(FLOATS, 1.0))


def test_an_update_of_zero_is_an_error_at_the_client() -> None:
    with pytest.raises(ZeroDivisionError):
        QUIET(instruction(FLOATS), context(), added(0.0))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.filterwarnings("ignore")
def test_nan_passes_the_clip_and_becomes_the_model(value: float) -> None:
    found = aggregated(wrapped(), FLOATS, train(FLOATS, value), train(FLOATS, 1.0))
    assert np.isnan(found["w"]).all()
    reply = QUIET(instruction(FLOATS), context(), added(value))
    assert np.isnan(reply.content["arrays"]["w"].numpy()).all()


def test_a_buffer_of_integers_is_an_error() -> None:
    with pytest.raises(TypeError, match="Cannot cast"):
        aggregated(wrapped(), model(), train(model(), 1), train(model(), 1))
    with pytest.raises(TypeError, match="Cannot cast"):
        QUIET(instruction(model()), context(), added(1.0))


def test_a_clipping_mod_of_the_whole_app_breaks_evaluation() -> None:
    app = ClientApp(mods=[fixedclipping_mod])
    app.evaluate()(lambda message, context: answer(message, ArrayRecord(), loss=1.0))
    reply = app(instruction(FLOATS, kind="evaluate", clipping_norm=1.0), context())
    assert reply.has_error()


def test_one_failed_client_skips_the_whole_round_and_plain_fedavg_does_not() -> None:
    lost = Message(Error(code=2, reason=""), reply_to=instruction(FLOATS))
    assert aggregated(wrapped(), FLOATS, train(FLOATS, 1.0), lost) is None
    assert aggregated(FedAvg(), FLOATS, train(FLOATS, 1.0), lost) is not None


def test_noise_comes_from_a_global_generator_that_any_code_can_seed() -> None:
    found = []
    for _ in range(2):
        np.random.seed(1)  # noqa: NPY002
        strategy = DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 1.0, 2)
        found.append(aggregated(strategy, FLOATS, train(FLOATS, 0.1), train(FLOATS, 0.1)))
    assert found[0]["w"].tolist() == found[1]["w"].tolist()


def test_noise_is_floats_so_that_the_sum_shows_what_was_under_it() -> None:
    """The same noise on 0 and on 1 gives different sets of floats: their last bits tell which it was."""
    found = []
    for value in (0.0, 1.0):
        np.random.seed(1)  # noqa: NPY002
        record = arrays(w=np.full(1000, value, np.float32))
        strategy = DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1e-3, 1.0, 2)
        found.append(aggregated(strategy, record, train(record, 0.0), train(record, 0.0))["w"])
    step = np.spacing(np.float32(0.5))
    assert (np.mod(found[1], step) == 0).all()
    assert (np.mod(found[0], step) != 0).mean() > 0.9


def test_the_servers_step_is_taken_before_the_noise() -> None:
    """FedAdam scales the clipped mean, and noise for a mean in which each client counts C / n is added to what comes out."""
    record = arrays(w=np.zeros(4, np.float32))
    found = aggregated(wrapped(strategy=FedAdam(eta=50.0, tau=1e-9)), record, train(record, 0.1), train(record, 0.1))
    assert np.linalg.norm(found["w"]) > 10.0


def test_the_accountant_knows_no_sampling() -> None:
    pytest.importorskip("dp_accounting", reason="needs dp-accounting")
    from flwr.serverapp import NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod

    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    poisson = PrivacyConfig(1e-5, 100, relation, SamplingMethod.POISSON)
    with pytest.raises(ValueError, match="requires sampling_method='no-amplification'"):
        DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 2, accountant=RdpAccountant(poisson))
    with pytest.raises(ValueError, match="Unsupported privacy accounting model"):
        RdpAccountant(PrivacyConfig(1e-5, 100, relation, SamplingMethod.WITHOUT_REPLACEMENT))


def test_fedavg_makes_floats_of_integers() -> None:
    found = aggregated(FedAvg(), model(), train(model(), 1), train(model(), 1))
    assert found["n"].dtype == np.float64


def test_masks_of_secure_aggregation_follow_from_32_bits() -> None:
    """256-bit keys that agree on the exclusive or of their words give the same masks."""
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    key = bytes(range(32))
    other = bytes(reversed(range(32)))
    word = 0
    for part in (key, other):
        for i in range(0, 32, 4):
            word ^= int.from_bytes(part[i : i + 4], "little")
    twin = (int.from_bytes(other[:4], "little") ^ word).to_bytes(4, "little") + other[4:]
    assert twin != key
    (one,), (two,) = (pseudo_rand_gen(k, 2**20, [(100,)]) for k in (key, twin))
    assert one.tolist() == two.tolist()


def test_the_page_has_a_row_for_each() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from-flower.md").read_text()
    assert all(f"`{name}`" in page for name in globals() if name.startswith("test_") and not name.startswith("test_the_page"))
