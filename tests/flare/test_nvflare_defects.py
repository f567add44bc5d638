"""What NVFlare's own privacy filters do, each shown on the installed version; docs/coming-from-nvflare.md lists them.

When NVFlare mends one of these, its test fails here: then the page loses a row, and the test goes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="needs nvflare (pip install 'fedveil[nvflare]')")

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FilterKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.utils.task_utils import get_filters
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy

LENET = 61_706
"""Parameters of LeNet-5."""
BOTH = pytest.mark.parametrize("filter", [PercentilePrivacy, SVTPrivacy])


def filtered(one: Any, arrays: dict[str, Any], kind: str = DataKind.WEIGHT_DIFF, **meta: Any) -> DXO:
    return from_shareable(one.process(DXO(kind, dict(arrays), dict(meta)).to_shareable(), FLContext()))


def test_percentile_privacy_adds_no_noise() -> None:
    """The same update gives the same result, so that a guess of it is confirmed with certainty: no epsilon holds."""
    update = {"w": np.random.default_rng(1).normal(size=100)}
    one, two = (filtered(PercentilePrivacy(), update).data["w"] for _ in range(2))
    assert one.tolist() == two.tolist()
    other = {"w": np.where(np.arange(100) == 3, -update["w"], update["w"])}
    assert filtered(PercentilePrivacy(), other).data["w"].tolist() != one.tolist()


@BOTH
def test_a_parameter_that_is_one_number_leaves_as_it_is(filter: Any) -> None:
    update = {"w": np.zeros(100), "scale": np.array(1234.5)}
    assert filtered(filter(), update).data["scale"] == 1234.5


@BOTH
def test_metrics_and_numbers_of_examples_leave_as_they_are(filter: Any) -> None:
    meta = {MetaKey.INITIAL_METRICS: {"accuracy": 0.8125}, MetaKey.NUM_STEPS_CURRENT_ROUND: 217}
    left = filtered(filter(), {"w": np.ones(100)}, **meta).meta
    assert {key: left[key] for key in meta} == meta


@BOTH
def test_full_weights_are_filtered_like_a_difference(filter: Any) -> None:
    """A job sends full weights by default, and the largest weight that is left is the filter's gamma."""
    weights = {"w": np.random.default_rng(1).normal(size=1000)}
    options = {} if filter is PercentilePrivacy else {"epsilon_release": 1e9}  # next to no noise
    left = filtered(filter(**options), weights, DataKind.WEIGHTS).data["w"]
    assert np.abs(weights["w"]).max() > 3
    assert np.abs(left).max() < 0.0101


@BOTH
@pytest.mark.parametrize("kind", [DataKind.METRICS, DataKind.ANALYTIC, DataKind.APP_DEFINED])
def test_other_kinds_of_data_leave_as_they_are(filter: Any, kind: str) -> None:
    assert filtered(filter(), {"w": 1234.5}, kind).data == {"w": 1234.5}


@BOTH
def test_a_reply_that_is_no_dxo_or_has_failed_leaves_as_it_is(filter: Any) -> None:
    bare, failed = Shareable(), make_reply(ReturnCode.EXECUTION_EXCEPTION)
    for reply in (bare, failed):
        reply["secret"] = [1.0, 2.0]
        assert filter().process(reply, FLContext())["secret"] == [1.0, 2.0]


def test_percentile_privacy_passes_nan() -> None:
    with np.errstate(invalid="ignore"):
        left = filtered(PercentilePrivacy(), {"w": np.array([1.0, np.nan, 2.0])}).data["w"]
    assert np.isnan(left).any()


def test_svt_privacy_never_ends_where_too_few_numbers_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def laplace(scale: float, size: int | None = None) -> Any:
        drawn.append(size)
        if len(drawn) > 1000:
            raise TimeoutError
        return 0.0 if size is None else np.zeros(size)

    monkeypatch.setattr(np.random, "laplace", laplace)
    with pytest.raises(TimeoutError), np.errstate(invalid="ignore"):
        filtered(SVTPrivacy(), {"w": np.full(100, np.nan)})


def test_svt_privacy_claims_epsilon_617_for_one_release_of_lenet() -> None:
    """Its accountant adds 0.1 for the choice of coordinates and 0.1 for each of the 6,171 numbers that leave."""
    one = SVTPrivacy()
    filtered(one, {"w": np.random.default_rng(1).normal(scale=1e-5, size=LENET)})
    assert one.get_privacy_spent() == pytest.approx(617.2)
    filtered(one, {"w": np.random.default_rng(2).normal(scale=1e-5, size=LENET)})
    assert one.get_privacy_spent() == pytest.approx(2 * 617.2)


def test_svt_privacy_forgets_what_was_spent_when_a_job_starts() -> None:
    one = SVTPrivacy()
    filtered(one, {"w": np.ones(100)})
    assert one.get_privacy_spent() > 0
    one.handle_event(EventType.START_RUN, FLContext())
    assert one.get_privacy_spent() == 0


def test_svt_privacy_takes_noise_from_a_global_generator_that_any_code_can_seed() -> None:
    found = []
    for _ in range(2):
        np.random.seed(1)  # noqa: NPY002
        found.append(filtered(SVTPrivacy(), {"w": np.ones(100)}).data["w"].tolist())
    assert found[0] == found[1]


def test_svt_privacy_adds_floats_whose_last_bits_show_what_was_under_them() -> None:
    """Noise on gamma gives multiples of a step that noise on 0 does not keep to: with the defaults, one release tells which."""
    gamma = 1e-5
    step = np.spacing(gamma / 2)
    for value, keeps in ((gamma, True), (0.0, False)):
        np.random.seed(1)  # noqa: NPY002
        left = filtered(SVTPrivacy(gamma=gamma), {"w": np.full(LENET, value)}).data["w"]
        assert bool((np.mod(left[left != 0], step) == 0).all()) is keeps


def test_svt_privacy_makes_noise_of_batch_counters() -> None:
    np.random.seed(1)  # noqa: NPY002
    update = {"w": np.zeros(10), "bn.num_batches_tracked": np.full(1000, 40, np.int64)}
    assert (filtered(SVTPrivacy(gamma=5.0), update).data["bn.num_batches_tracked"] < 0).any()


def test_a_filter_for_every_task_never_runs() -> None:
    table = {"*" + FilterKey.DELIMITER + FilterKey.OUT: [SVTPrivacy()]}
    assert get_filters("task_result_filters", FLContext(), table, "train", FilterKey.OUT) == []


def test_the_page_has_a_row_for_each() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from-nvflare.md").read_text()
    assert all(f"`{name}`" in page for name in globals() if name.startswith("test_") and not name.startswith("test_the_page"))
