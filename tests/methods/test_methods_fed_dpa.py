"""FedDPA: one round against the authors' program, the split by hand, its two accountants, and what is proven of each form."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import method_kit as h
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Unbounded, View
from fedveil.methods.method import weighting_of
from fedveil.methods.run_cost import events_in_view
from fedveil.papers.fedglp_adp.claim import opacus_epsilon, opacus_noise_multiplier, record_steps
from fedveil.papers.fedglp_adp.fisher_baselines import FedDPA, TwoPasses, fisher, fisher_split, pull, pull_to, scaled
from fedveil.papers.fedglp_adp.sparse_baselines import sigma_of
from fedveil.training.local import train
from fisher_clients import X, Y, as_recorded, client, network

PUBLISHED = FedDPA(variant="published")
THEIRS = [-0.019999, -0.020013, 0.020005, -0.019986, -0.019994, -0.020014, 0.020004, -0.020002, -0.063647, 0.019981, 0.020014]
THEIRS += [-0.020012, -0.019972, -0.019992, -0.144834, -0.020004, 0.019674, -0.104852, 0.020004, -0.019674, 0.06511, 0.019994]
THEIRS += [0.142096]
"""The update that `local_update` of DynamicPFL's ours.py makes of `client`, with two local epochs."""


def trained(method: FedDPA, **changes: Any) -> tuple[torch.Tensor, Any]:
    local = client(2)
    update, _ = train(local, X, Y, TwoPasses(method, replace(h.setting(), layout=local.model.layout, **changes)))
    return update, local


def test_one_round_is_that_of_the_authors_program(monkeypatch: pytest.MonkeyPatch) -> None:
    as_recorded(monkeypatch)
    update, local = trained(PUBLISHED)
    assert update.tolist() == pytest.approx(THEIRS, abs=2e-6)
    assert local.state["personal"].tolist() == pytest.approx((update + local.start).tolist(), abs=1e-7)


def test_what_is_sent_of_personal_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    as_recorded(monkeypatch)
    _, local = trained(PUBLISHED)
    personal = local.scratch["split"].personal
    assert 0 < int(personal.sum()) < 23
    own, _ = trained(FedDPA())
    assert not own[personal].any()
    assert own[~personal].tolist() == pytest.approx(torch.tensor(THEIRS)[~personal].tolist(), abs=2e-6)


def test_the_form_of_the_text_noises_shared_coordinates_only() -> None:
    method = FedDPA(variant="published", source="paper", clip=0.01, sigma=3.0)
    s = method.calibrate(replace(h.setting(), noise_multiplier=None))
    assert sigma_of(s) == pytest.approx(3.0)
    updates = []
    for normal in (torch.zeros, torch.ones):
        local = client(2)
        local.normal = normal
        updates.append(train(local, X, Y, TwoPasses(method, replace(s, layout=local.model.layout)))[0])
    shared = ~local.scratch["split"].personal
    noise = 3.0 * 0.01 / math.sqrt(4)
    assert (updates[1] - updates[0]).tolist() == pytest.approx((noise * shared).tolist(), abs=1e-7)
    assert float(updates[0].norm()) == pytest.approx(0.01, rel=1e-4)
    assert local.noise_power is not None
    assert float(local.noise_power.sum()) == pytest.approx(noise**2 * int(shared.sum()), rel=1e-5)


def test_fisher_information_by_one_gradient_after_the_other() -> None:
    local = client(1)
    found = fisher(local, h.setting())
    each = []
    for x, y in zip(X, Y, strict=True):
        module = network(0.0).module
        torch.nn.functional.cross_entropy(module(x[None]), y[None]).backward()  # type: ignore[no-untyped-call]
        each.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
    assert found.tolist() == pytest.approx(torch.stack(each).square().mean(0).tolist(), rel=1e-4, abs=1e-9)


class Words(nn.Module):
    """A sparse table, a parameter that is one number, and where `looks`, a decision by values."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.table, self.out, self.gain = nn.Embedding(7, 5, sparse=True), nn.Linear(5, 2), nn.Parameter(torch.tensor(0.4))
        self.looks = looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = x[:, :3] if self.looks and int(x.max()) > 9 else x
        return self.out(torch.tanh(self.table(words)).mean(1)) * self.gain.exp()  # type: ignore[no-any-return]


@pytest.mark.parametrize("looks", [False, True])
def test_fisher_information_of_sparse_tables_and_single_numbers(looks: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randint(0, 7, (9, 4)), torch.arange(9) % 2
    local = h.local_of(Words(looks), training={"per_example": "loop" if looks else "vmap"}, data=(x, y), examples=9)
    model = local.model
    found, total = fisher(local, h.setting()), torch.zeros_like(model.vector)
    parameters = list(model.module.parameters())
    for i in range(9):
        loss = torch.nn.functional.cross_entropy(model.module(x[i : i + 1]), y[i : i + 1])
        total += torch.cat([g.to_dense().flatten() for g in torch.autograd.grad(loss, parameters)]).square()
    assert float((found - total / 9).norm()) <= 1e-5 * float(found.norm())
    assert float(found[-1]) > 0


def test_the_first_client_of_a_process_does_not_choose_how_the_gradients_of_the_others_are_rounded() -> None:
    def of_the_second(first: float) -> torch.Tensor:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
        x, y = torch.randn(40, 20), torch.randint(0, 2, (40,))
        local = h.local_of(network, data=(x, y), examples=40)
        model, statistics = local.model, local.model.buffers()
        model.load_buffers(statistics * first)
        local.state["personal"] = local.start * first
        fisher_split(local, h.setting(), 0.4, skip_zeros=False)
        model.load_buffers(statistics)
        model.load(local.start)
        return fisher(local, h.setting())

    assert of_the_second(math.nan).tolist() == of_the_second(1.0).tolist()


def test_a_client_that_fails_leaves_the_network_in_training_mode() -> None:
    class Refuses(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("out of range")

    local = client(1)
    local.model = h.local_of(Refuses(4, 2)).model
    local.start = local.model.vector.clone()
    with pytest.raises(ValueError, match="out of range"):
        fisher(local, h.setting())
    assert local.model.module.training


def test_scales_and_pulls_by_hand() -> None:
    layout = h.layout({"a": (2,), "b": (2,), "c": (1,)})
    assert scaled(torch.tensor([1.0, 3.0, 5.0, 5.0, 2.0]), layout).tolist() == [0, 1, 0, 0, 0]
    moved = torch.tensor([3.0, 4.0, 0.0, 0.0, -2.0])
    assert pull(moved, layout).tolist() == pytest.approx([0.6, 0.8, 0, 0, -1])
    assert pull_to(moved, layout, 6.9).tolist() == pytest.approx([0.6, 0.8, 0, 0, -1])
    assert pull_to(moved, layout, 7.1).tolist() == pytest.approx([-0.6, -0.8, 0, 0, 1])


def test_a_weight_of_zero_is_trained_unless_the_program_is_followed() -> None:
    for skip in (True, False):
        local = client(1)
        local.start[:12], local.state["personal"][:12] = 0.0, 0.0
        split = fisher_split(local, h.setting(), 0.4, skip_zeros=skip)
        assert bool((split.trains_personal | split.trains_shared)[:12].any()) is not skip
        assert (split.trains_personal | split.trains_shared)[12:].all()


# --- noise and claims --------------------------------------------------------------------------------------------------


def test_the_program_counts_records_and_a_client_has_an_epsilon_of_forty() -> None:
    """SVHN, the program's defaults: 15 rounds, 2 epochs, batch 16, delta = 0.1, epsilon = 1."""
    rate, steps = record_steps(16, 73_257, 15, 2)
    assert (rate, steps) == (pytest.approx(16 / 73_257), pytest.approx(15 * 2 * 73_257 / 16))
    z = opacus_noise_multiplier(1.0, steps, 0.1, rate=rate)
    assert z == pytest.approx(0.49, abs=0.005)
    assert opacus_epsilon(z, steps, 0.1, rate=rate) == pytest.approx(1.0, rel=1e-6)
    assert epsilon_of(math.sqrt(15) / z, 0.1) == pytest.approx(40, abs=1)
    assert epsilon_of(math.sqrt(15) / 4.2, 0.1) == pytest.approx(1, abs=0.01)


FORMS = [("repo", None, "records"), ("paper", None, "rounds"), ("repo", "rounds", "rounds")]


@pytest.mark.parametrize(("source", "accountant", "counted"), FORMS)
def test_noise_and_claim_by_either_accountant(source: Any, accountant: Any, counted: str) -> None:
    method = FedDPA(variant="published", source=source, accountant=accountant)
    s = method.calibrate(h.setting(noise_multiplier=None, epsilon=2.0, delta=0.1))
    rate, steps = record_steps(25, 1000, 20, 1, 0.4) if counted == "records" else (0.4, 20.0)
    wanted = opacus_noise_multiplier(2.0, steps, 0.1, rate=rate)
    assert (s.noise_multiplier, s.epsilon) == (pytest.approx(wanted / 2), None)
    assert method.calibrate(s) == s
    claim = method.claim(s)
    assert claim is not None
    assert claim.epsilon == pytest.approx(2.0, rel=1e-6)
    assert claim.scope.view is View.AGGREGATE
    events = method.releases(s, View.SERVER)
    if source == "paper":
        assert isinstance(events[0], Unbounded)
    else:
        assert math.sqrt(sum(e.count * e.mu**2 for e in events)) == pytest.approx(math.sqrt(20) / (wanted / 2))  # type: ignore[union-attr]
        assert events_in_view(method, s, View.AGGREGATE) == events, "weights by size: the sum is not credited with n equal shares"


def test_proven_costs_the_configured_epsilon_and_counts_all_clients_alike() -> None:
    for view in ("server", "aggregate"):
        job = h.job_of(h.at_epsilon_8({"name": "fed-dpa"}, f"privacy.view={view}"))
        h.trained(job)
        for client_number in range(6) if view == "server" else [-1]:
            assert 0.999 * 8.0 < epsilon_of(math.sqrt(h.book(job).mu2(client_number)), 1e-3) <= 8.0
        assert weighting_of(job.method) == "uniform"
    assert weighting_of(PUBLISHED) == "examples"  # type: ignore[arg-type]


def test_it_learns_personal_models() -> None:
    skewed = {"partition": {"kind": "dirichlet", "clients": 20, "alpha": 0.1}, "client_test_fraction": 0.3}
    adam = ("training.optimizer.name=adam", "training.optimizer.lr=0.01")
    config = h.digits({"name": "fed-dpa"}, *adam, rounds=6, data=skewed, privacy={"epsilon": 8.0})
    last = h.trained(h.job_of(config)).history[-1]
    assert last["mean_personal_accuracy"] > 0.35
    assert 0 < last["mask_share"] < 0.5
