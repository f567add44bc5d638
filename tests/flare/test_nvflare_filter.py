"""fedveil's filter for NVFlare by itself, called as NVFlare calls it; jobs in the simulator are in test_nvflare_jobs.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("nvflare", reason="needs nvflare (pip install 'fedveil[nvflare]')")

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ProcessType, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.utils.task_utils import apply_filters
from nvflare.apis.workspace import Workspace
from nvflare.app_common.app_constant import AlgorithmConstants
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.private.fed.client.client_runner import _TASK_CHECK_RESULT_OK, ClientRunner

import fedveil as fv
from fedveil.deploy.nvflare import NoisyAggregator, ReleaseFilter
from fedveil.errors import BudgetExhausted, ConfigError, UpdateRefused

TOTAL: dict[str, Any] = {"clip": 1.0, "epsilon": 8.0, "delta": 1e-3, "rounds": 3, "clients": 12}
NOISE = 20.0
"""More than any noise of these tests."""
Trained = Callable[[dict[str, Any]], Shareable]


class Site:
    """A site of NVFlare that runs tasks through chains of filters, as its ClientRunner does."""

    def __init__(self, folder: Path, *more: Any, before: tuple[Any, ...] = (), name: str = "site-1", **numbers: Any) -> None:
        self.filter = ReleaseFilter(**{**TOTAL, **numbers}, ledger=str(folder))
        self.contexts = FLContextManager(identity_name=name, job_id="job")
        self.chains = {"train/in": [self.filter], "train/out": [*before, self.filter, *more]}
        self.ledger, self.tasks = folder / f"{name}.ledger", 0

    def ran(self, model: dict[str, Any] | None, trained: Trained, kind: str = DataKind.WEIGHTS) -> Shareable:
        """Return what leaves the site."""
        context, self.tasks = self.contexts.new_context(), self.tasks + 1
        context.set_prop(FLContextKey.TASK_ID, self.tasks, private=True, sticky=False)
        context.set_prop(FLContextKey.TASK_NAME, "train", private=True, sticky=False)
        instruction = Shareable() if model is None else DXO(kind, deepcopy(model)).to_shareable()
        came = apply_filters("task_data_filters", instruction, context, self.chains, "train", FilterKey.IN)
        result = trained({} if model is None else from_shareable(came).data)
        return apply_filters("task_result_filters", result, context, self.chains, "train", FilterKey.OUT)

    def charged(self) -> int:
        """Return the number of releases that were charged."""
        head = self.ledger.with_name(f"{self.ledger.name}-head")
        return int(head.read_text().split()[3]) if head.exists() else 0


def in_place(step: int = 1000, **meta: Any) -> Trained:
    """Training that adds a number to every array in place."""

    def trained(model: dict[str, Any]) -> Shareable:
        for value in model.values():
            value += step
        return DXO(DataKind.WEIGHTS, model, meta).to_shareable()

    return trained


def answer(data: Any, kind: str = DataKind.WEIGHTS, **meta: Any) -> Trained:
    return lambda model: DXO(kind, data, meta).to_shareable()


def model() -> dict[str, Any]:
    return {"w": np.full((2, 3), 100.0, np.float32), "n": np.array(7), "bn.num_batches_tracked": np.array(3.0)}


pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "ledgers")


def test_full_weights_leave_as_the_model_that_came_and_a_noisy_difference(site: Site) -> None:
    """Training in place changes the arrays that NVFlare handed it, and NVFlare forgets the task's data before results."""
    left = from_shareable(site.ran(model(), in_place()))
    assert left.data_kind == DataKind.WEIGHTS
    moved = np.abs(left.data["w"] - 100)
    assert moved.min() > 0
    assert moved.max() < NOISE
    assert site.charged() == 1


def test_a_difference_leaves_as_a_noisy_difference(site: Site) -> None:
    left = from_shareable(site.ran(model(), answer({"w": np.full((2, 3), 1e3)}, DataKind.WEIGHT_DIFF)))
    assert left.data_kind == DataKind.WEIGHT_DIFF
    assert np.abs(left.data["w"]).max() < NOISE
    assert left.data["w"].dtype == np.float32


def test_without_a_model_nothing_leaves(site: Site) -> None:
    with pytest.raises(UpdateRefused, match="no model is known"):
        site.ran(None, answer({"w": np.ones(3)}))
    site.chains["train/in"] = []
    with pytest.raises(UpdateRefused, match="no model is known"):
        site.ran(model(), in_place())
    assert site.charged() == 0


def test_a_model_of_another_task_is_no_reference(site: Site) -> None:
    def later(model: dict[str, Any]) -> Shareable:
        context.set_prop(FLContextKey.TASK_ID, "other", private=True, sticky=False)
        return in_place()(model)

    context = site.contexts.new_context()
    site.contexts = SimpleNamespace(new_context=lambda: context)  # type: ignore[assignment]
    with pytest.raises(UpdateRefused, match="no model is known"):
        site.ran(model(), later)


def job(*tasks: str, folder: Path) -> tuple[ReleaseFilter, Any, FLContext]:
    made = ReleaseFilter(**TOTAL, ledger=str(folder))
    runner = SimpleNamespace(task_result_filters={f"{task}/out": [made] for task in tasks}, task_data_filters={})
    context = FLContext()
    context.set_prop(FLContextKey.RUNNER, runner, private=True)
    return made, runner, context


def test_the_filter_joins_the_task_data_filters_of_its_tasks(tmp_path: Path) -> None:
    made, runner, context = job("train", "other", folder=tmp_path)
    made.handle_event(EventType.START_RUN, context)
    assert runner.task_data_filters == {"train/in": [made], "other/in": [made]}


def test_a_filter_for_every_task_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, context = job("*", folder=tmp_path)
    problems: list[str] = []
    monkeypatch.setattr(made, "system_panic", lambda reason, fl_ctx: problems.append(reason))
    made.handle_event(EventType.START_RUN, context)
    assert "name each" in problems[0]
    with pytest.raises(ConfigError, match="name each"):
        made.add_to_fed_job(SimpleNamespace(), None, tasks=["*"])


def test_a_filter_at_the_server_is_refused(site: Site) -> None:
    job = FedJob(name="job", min_clients=1)
    with pytest.raises(ValueError, match="can only be assigned"):
        job.to_server(site.filter, filter_type=FilterType.TASK_RESULT)
    context = site.contexts.new_context()
    context.set_prop(FLContextKey.PROCESS_TYPE, ProcessType.SERVER_JOB, private=True, sticky=False)
    with pytest.raises(UpdateRefused, match="for sites"):
        apply_filters("task_result_filters", Shareable(), context, {"train/in": [site.filter]}, "train", FilterKey.IN)


@pytest.mark.parametrize("code", [ReturnCode.EXECUTION_EXCEPTION, ReturnCode.BAD_TASK_DATA, "secret"])
def test_a_failed_result_leaves_as_an_error_code_alone(site: Site, code: str) -> None:
    def failed(model: dict[str, Any]) -> Shareable:
        reply = make_reply(code)
        reply["secret"] = DXO(DataKind.WEIGHTS, model)
        return reply

    left = site.ran(model(), failed)
    assert dict(left) == dict(make_reply(ReturnCode.EXECUTION_EXCEPTION))
    assert site.charged() == 0


@pytest.mark.parametrize("kind", [DataKind.METRICS, DataKind.ANALYTIC, DataKind.STATISTICS, DataKind.APP_DEFINED])
def test_other_kinds_of_data_are_refused(site: Site, kind: str) -> None:
    with pytest.raises(UpdateRefused, match="kind"):
        site.ran(model(), answer({"w": np.ones(3)}, kind))


def test_a_result_that_is_no_dxo_is_refused(site: Site) -> None:
    with pytest.raises(UpdateRefused, match="no DXO"):
        site.ran(model(), lambda model: Shareable({"secret": 1.0}))
    assert site.charged() == 0


def test_nothing_but_the_weights_leaves_and_every_site_has_weight_1(site: Site) -> None:
    meta = {"initial_metrics": {"accuracy": 0.8125}, MetaKey.NUM_STEPS_CURRENT_ROUND: 217}

    def trained(model: dict[str, Any]) -> Shareable:
        result = in_place(**meta)(model)
        result["secret"] = 1234.5
        result.set_header("secret", 1234.5)
        return result

    left = site.ran(model(), trained)
    assert "1234.5" not in str(left)
    assert left["DXO"]["meta"] == {MetaKey.NUM_STEPS_CURRENT_ROUND: 1}


def test_the_second_vector_of_scaffold_is_refused(site: Site) -> None:
    with pytest.raises(UpdateRefused, match="SCAFFOLD"):
        site.ran(model(), in_place(**{AlgorithmConstants.SCAFFOLD_CTRL_DIFF: {"w": np.ones(3)}}))
    assert site.charged() == 0


@pytest.mark.parametrize(
    "data",
    [
        {"gradient": np.ones(3), "hessian": np.ones((3, 3))},
        {**model(), "more": np.ones(3)},
        {"w": np.ones((3, 2), np.float32)},
        {"w": np.ones((2, 3), np.int64)},
        {"w": np.ones((2, 3), np.complex64)},
        {"w": [[1.0] * 3] * 2},
        {"w": np.array([[object()] * 3] * 2)},
        {"n": np.array(8)},
        {},
    ],
    ids=["hello-lr", "more", "shape", "integers", "complex", "list", "objects", "no parameter", "empty"],
)
def test_other_arrays_than_those_that_came_are_refused(site: Site, data: dict[str, Any]) -> None:
    with pytest.raises(UpdateRefused):
        site.ran(model(), answer(data))
    assert site.charged() == 0


def test_weights_in_a_model_and_alone_in_a_collection_are_unwrapped(site: Site, tmp_path: Path) -> None:
    inner = {"params": model(), "params_type": "FULL", "metrics": {"loss": 1234.5}, "meta": {"secret": 1234.5}}
    left = from_shareable(site.ran(model(), answer(inner, DataKind.FL_MODEL)))
    assert set(left.data) == {"params", "params_type", "meta"}
    assert "1234.5" not in str(left.data)
    assert np.abs(left.data["params"]["w"] - 100).max() < NOISE
    member, site = DXO(DataKind.WEIGHTS, model(), {"secret": 1234.5}), Site(tmp_path / "others")
    came = {"one": DXO(DataKind.WEIGHTS, model())}
    left = from_shareable(site.ran(came, answer({"one": member}, DataKind.COLLECTION), DataKind.COLLECTION))
    for form in (model(), came):
        with pytest.raises(UpdateRefused, match="names are sent unprotected"):
            kind = DataKind.COLLECTION if form is came else DataKind.WEIGHTS
            site.ran(form, answer({"n_examples=1234": member}, DataKind.COLLECTION), kind)
    assert left.data["one"].meta == {MetaKey.NUM_STEPS_CURRENT_ROUND: 1}
    with pytest.raises(UpdateRefused):
        site.ran(model(), answer({"one": member, "two": DXO(DataKind.METRICS, {"loss": 1.0})}, DataKind.COLLECTION))
    with pytest.raises(UpdateRefused):
        site.ran(model(), answer({**inner, "optimizer_params": {"w": np.ones(3)}}, DataKind.FL_MODEL))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_tensors_leave_as_tensors_of_the_type_that_came(site: Site, kind: torch.dtype) -> None:
    came = {"w": torch.full((2, 3), 100.0, dtype=kind), "n": torch.tensor(7)}
    left = from_shareable(site.ran(came, in_place())).data
    assert left["w"].dtype == kind
    assert left["w"].shape == (2, 3)
    assert (left["w"].float() - 100).abs().max() < NOISE
    assert left["n"].tolist() == 7


def test_what_was_an_integer_goes_back_as_it_came_in_every_round(site: Site) -> None:
    """The server's average makes floats of integers, so that they come as floats later."""
    for n in (np.array(7), np.array(7.5), np.array(6.25)):
        left = from_shareable(site.ran({**model(), "n": n}, in_place())).data
        assert (left["n"], left["bn.num_batches_tracked"]) == (n, 3.0)
        assert left["n"].dtype == n.dtype


def test_what_cannot_leave_is_a_noised_zero_and_charged(site: Site) -> None:
    for value in (np.nan, np.inf):
        left = from_shareable(site.ran(model(), answer({**model(), "w": np.full((2, 3), value)}))).data
        assert 0 < np.abs(left["w"] - 100).max() < NOISE
    assert site.charged() == 2


def test_a_model_that_has_diverged_is_refused_before_training(site: Site) -> None:
    site.ran(model(), in_place())
    with pytest.raises(UpdateRefused, match="diverged"):
        site.ran({**model(), "w": np.full((2, 3), np.nan)}, pytest.fail)
    assert site.charged() == 1


def test_it_stands_behind_filters_that_leave_arrays_out(tmp_path: Path) -> None:
    site = Site(tmp_path, before=(ExcludeVars(["v"]),))
    came = {**model(), "v": np.ones(3)}
    assert set(from_shareable(site.ran(came, in_place())).data) == {"w", "n", "bn.num_batches_tracked"}
    with pytest.raises(UpdateRefused, match="other arrays than the first one"):
        Site.ran(site, came, answer({"v": np.ones(3), "w": came["w"]}))


class Quantizer(DXOFilter):
    """Stands for NVFlare's ModelQuantizer, which needs a GPU's library: 8 bits in the place of each float."""

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        dxo.data = {name: np.asarray(value, np.uint8) for name, value in dxo.data.items()}
        return dxo


def test_it_stands_before_the_quantizer_and_encryption(tmp_path: Path) -> None:
    quantizer = Quantizer([DataKind.WEIGHTS], None)
    left = from_shareable(Site(tmp_path / "before", quantizer).ran(model(), in_place()))
    assert left.data["w"].dtype == np.uint8
    after = Site(tmp_path / "after", before=(quantizer,))
    with pytest.raises(UpdateRefused, match="uint8"):
        after.ran(model(), in_place())
    with pytest.raises(UpdateRefused, match="put fedveil's filter before it"):
        Site(tmp_path / "encrypted").ran(model(), in_place(**{MetaKey.PROCESSED_ALGORITHM: "_HE_"}))
    assert after.charged() == 0


def test_the_lifetime_of_a_site_ends_after_its_rounds_in_whatever_job(site: Site, tmp_path: Path) -> None:
    for _ in range(2):
        site.ran(model(), in_place())
    next_job = Site(tmp_path / "ledgers")
    next_job.contexts = FLContextManager(identity_name="site-1", job_id="another")
    next_job.ran(model(), in_place())
    for one in (site, next_job):
        with pytest.raises(BudgetExhausted):
            one.ran(model(), in_place())
    assert site.charged() == 3
    assert fv.verification(site.ledger).outcome == "verified"
    other = Site(tmp_path / "ledgers", name="site-2")
    other.ran(model(), in_place())
    assert other.charged() == 1


def test_other_numbers_than_those_of_the_ledger_release_nothing(site: Site, tmp_path: Path) -> None:
    site.ran(model(), in_place())
    with pytest.raises(ConfigError):
        Site(tmp_path / "ledgers", epsilon=80.0).ran(model(), in_place())
    assert site.charged() == 1


@pytest.mark.parametrize(
    "odd",
    [
        {"clip": 0}, {"clip": 1e300}, {"clip": 1e-40}, {"epsilon": np.nan}, {"rounds": 2.5}, {"clients": 0}, {"ledger": "here"},
        {"delta": 1.0}, {"delta": 0.09},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_arguments_are_refused_where_a_job_is_written(odd: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(odd))):
        ReleaseFilter(**{**TOTAL, "ledger": str(tmp_path), **odd})
    assert not list(tmp_path.iterdir())
    where = {"out": odd["ledger"]} if "ledger" in odd else {"out": str(tmp_path / "run"), **odd}
    with pytest.raises(ConfigError):
        NoisyAggregator(**{**TOTAL, **where})


@pytest.mark.parametrize("first", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_the_form_of_a_result_is_that_of_the_first_one(site: Site, first: str) -> None:
    """A site that chooses it anew each round says one bit about its data, without noise."""
    forms = {
        DataKind.WEIGHTS: answer(model()),
        DataKind.WEIGHT_DIFF: answer(
            {"w": np.ones((2, 3)), "n": np.array(7), "bn.num_batches_tracked": np.array(3.0)}, "WEIGHT_DIFF"
        ),
        DataKind.FL_MODEL: answer({"params": model(), "params_type": "FULL"}, DataKind.FL_MODEL),
    }
    site.ran(model(), forms.pop(first))
    for other in forms.values():
        with pytest.raises(UpdateRefused, match="and the first one of this job as"):
            site.ran(model(), other)
    assert site.charged() == 1


def test_the_statement_names_the_ways_round_the_filter(site: Site) -> None:
    site.ran(model(), in_place())
    page = site.ledger.with_suffix(".md").read_text()
    for word in ("validate", "submit_model", "federation events", "ccwf", "collab", "streamed logs"):
        assert word in page
    assert "epsilon = 8" in page


def test_a_retry_sends_the_same_bytes_and_needs_no_new_charge(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    result = site.ran(model(), in_place())

    def send(reply: Shareable, fl_ctx: Any, timeout: Any) -> bool:
        sent.append(from_shareable(reply).data["w"].tobytes())
        return len(sent) == 3

    runner = ClientRunner.__new__(ClientRunner)
    runner.engine = SimpleNamespace(send_task_result=send)
    runner.run_abort_signal, runner.parent_target = SimpleNamespace(triggered=False), "server"
    runner.task_check_interval, runner.submit_task_result_timeout = 0.0, None
    monkeypatch.setattr(runner, "_check_task_once", lambda task_id, fl_ctx: _TASK_CHECK_RESULT_OK)
    for name in ("log_info", "log_debug", "log_error"):
        monkeypatch.setattr(runner, name, lambda *arguments: None, raising=False)
    assert runner._send_task_result(result, "task", FLContext())
    assert len(sent) == 3
    assert len(set(sent)) == 1
    assert site.charged() == 1


def test_the_privacy_policy_of_a_site_builds_the_filter_without_an_allow_list(tmp_path: Path) -> None:
    """What docs/coming-from-nvflare.md has; the policy of a site holds for every task, and comes before the job's filters."""
    for name in ("startup", "local"):
        (tmp_path / name).mkdir()
    entry = {"path": "fedveil.deploy.nvflare.ReleaseFilter", "args": {**TOTAL, "ledger": str(tmp_path / "ledgers")}}
    scope = {"name": "noised", "task_data_filters": [entry], "task_result_filters": [entry]}
    (tmp_path / "local" / "privacy.json").write_text(json.dumps({"scopes": [scope], "default_scope": "noised"}))
    manager = create_privacy_manager(Workspace(str(tmp_path), "site-1"), names_only=False)
    site = Site(tmp_path / "ledgers")
    site.contexts = FLContextManager(
        identity_name="site-1", job_id="job", private_stickers={FLContextKey.SCOPE_OBJECT: manager.get_scope(None)}
    )
    site.chains = {}
    left = from_shareable(site.ran(model(), in_place())).data
    assert np.abs(left["w"] - 100).max() < NOISE
    assert site.charged() == 1
    assert manager.get_scope("another") is None


def of_policy(folder: Path) -> FLContextManager:
    """Return contexts of a site whose own policy has a filter, as NVFlare makes them."""
    site = ReleaseFilter(**TOTAL, ledger=str(folder))
    scope = SimpleNamespace(task_data_filters={"in": [site]}, task_result_filters={"out": [site]})
    return FLContextManager(identity_name="site-1", job_id="job", private_stickers={FLContextKey.SCOPE_OBJECT: scope})


def test_with_a_filter_in_the_policy_the_one_of_the_job_adds_nothing(tmp_path: Path) -> None:
    """The first one charged, and the second refused, so that a site paid for rounds of which nothing left."""
    site = Site(tmp_path / "of the job", clip=2.0)
    site.contexts = of_policy(tmp_path / "ledgers")
    left = from_shareable(site.ran(model(), in_place())).data
    assert 0 < np.abs(left["w"] - 100).max() < NOISE
    assert site.charged() == 0
    assert fv.verification(tmp_path / "ledgers" / "site-1.ledger").outcome == "verified"
    assert not (tmp_path / "of the job").exists()


class Replacing(Quantizer):
    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        return DXO(DataKind.WEIGHTS, from_shareable(shareable).data).to_shareable()


def test_a_result_that_is_replaced_between_two_filters_is_refused_with_the_reason(tmp_path: Path) -> None:
    site = Site(tmp_path / "of the job", before=(Replacing([DataKind.WEIGHTS], None),))
    site.contexts = of_policy(tmp_path / "ledgers")
    with pytest.raises(UpdateRefused, match="a filter between them has replaced it: keep one"):
        site.ran(model(), in_place())


def test_a_release_that_comes_back_in_another_task_is_a_result_like_others(site: Site) -> None:
    left = site.ran(model(), in_place())

    def again(_: dict[str, Any]) -> Shareable:
        from_shareable(left).data["w"][:] = 1e6
        return left

    assert np.abs(from_shareable(site.ran(model(), again)).data["w"] - 100).max() < NOISE
    assert site.charged() == 2
