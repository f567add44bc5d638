from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedveil.attacks import IG, Bounds, CapturedUpload, Knowledge
from fedveil.attacks.gan import Fitting, features, fit
from fedveil.attacks.labels import from_gradients, from_outputs, gradient_scores, identify, inversion_scores, tpr_at
from fedveil.attacks.model_attacks import KnowledgeExtraction, divergence, infer_attribute
from fedveil.errors import ConfigError

Digits = tuple[Tensor, Tensor]
Make = Callable[..., CapturedUpload]


def _rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def clients(digits: Digits) -> list[tuple[Tensor, Tensor]]:
    """Twenty clients, each with 20 digits of two classes."""
    x, y = digits
    made = []
    for i in range(20):
        members = ((y == i % 10) | (y == (i * 3 + 1) % 10)).nonzero().flatten()
        chosen = members[torch.randperm(len(members), generator=_rng(i))[:20]]
        made.append((x[chosen], y[chosen]))
    return made


def _uploads(clients: list[tuple[Tensor, Tensor]], net: nn.Module, make: Make, sigma: float) -> list[CapturedUpload]:
    std = {k: sigma for k, _ in net.named_parameters()}
    return [make(net, x, y, std, seed) for seed, (x, y) in enumerate(clients)]


def test_clients_are_found_without_noise_and_hidden_by_much(
    clients: list[tuple[Tensor, Tensor]], relu_cnn: nn.Sequential, make_upload: Make
) -> None:
    probes = [(x[:10], y[:10]) for x, y in clients[:8]]
    found = {}
    for sigma in (0.0, 10.0):
        scores = gradient_scores(
            _uploads(clients, relu_cnn, make_upload, sigma), probes, lambda: relu_cnn, relu_cnn.state_dict(), Knowledge()
        )
        found[sigma] = identify(scores, range(8), "gradient", flagged=2)
    assert found[0.0].matched >= 0.8
    assert found[0.0].tpr >= 0.5
    assert found[10.0].matched <= 0.3
    assert found[0.0].chance_matched == pytest.approx(0.05)
    assert found[0.0].chance_top == pytest.approx(0.1)
    assert (found[0.0].rule, found[0.0].targets, found[0.0].uploads) == ("gradient", 8, 20)


def test_clients_are_found_by_inversion(digits: Digits, relu_cnn: nn.Sequential, make_upload: Make) -> None:
    x, y = digits
    ones = [(y == c).nonzero().flatten()[:2] for c in (0, 1, 4)]
    uploads = [make_upload(relu_cnn, x[i[:1]], y[i[:1]]) for i in ones]
    probes = [(x[i], y[i]) for i in ones]
    attacker = Knowledge(n=1), Bounds((1, 28, 28)), _rng()
    images = [IG(60).run([upload], lambda: relu_cnn, relu_cnn.state_dict(), *attacker).x for upload in uploads]
    scores = inversion_scores(relu_cnn, probes, images)
    assert identify(scores, range(3), "inversion").matched == 1


def test_equal_scores_identify_nobody_but_by_chance() -> None:
    found = [identify(torch.zeros(10, 100), range(10), "gradient", seed=seed) for seed in range(200)]
    assert np.mean([f.matched for f in found]) == pytest.approx(0.01, abs=0.01)
    assert np.mean([f.top for f in found]) == pytest.approx(0.1, abs=0.03)
    assert {f.tpr for f in found} == {0.0}


def test_identification_by_hand() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.0, 0.1], [0.95, 0.7, 0.2, 0.3]])
    result = identify(scores, [0, 1], "gradient", flagged=1)
    assert result.matched == 1  # 0.9 + 0.7 beats 0.95 + 0.1, although upload 0 suits target 1 best
    assert result.top == 0.5
    assert result.tpr == 0  # the false pair (1, 0) scores highest of all, and 1 % of 6 allows none
    assert identify(scores, [2, 1], "gradient").matched == 0.5


def test_tpr_at_a_false_positive_rate() -> None:
    negative = np.arange(200.0)
    positive = np.array([150.0, 197.0, 197.5, 198.5, 300.0])
    assert tpr_at(positive, negative, 0.01) == pytest.approx(3 / 5)  # two of 200 may exceed: the threshold is 197
    assert tpr_at(positive, negative, 0.0) == pytest.approx(1 / 5)


def test_scores_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        identify(torch.zeros(2, 3), [0], "gradient")
    with pytest.raises(ConfigError, match="finite"):
        identify(torch.full((1, 3), float("nan")), [0], "gradient")


def test_the_two_label_rules_differ_on_an_untrained_network(digits: Digits, relu_cnn: nn.Sequential, make_upload: Make) -> None:
    x, y = digits
    sent = [make_upload(relu_cnn, x[i : i + 1], y[i : i + 1]) for i in range(30)]
    gradient = from_gradients(sent, y[:30], lambda: relu_cnn, relu_cnn.state_dict(), Knowledge())
    output = from_outputs(x[:30], y[:30], lambda: relu_cnn, relu_cnn.state_dict())
    assert gradient.accuracy == 1
    assert output.accuracy < 0.4
    assert (gradient.rule, output.rule) == ("gradient", "output")
    assert gradient.constant_guess == pytest.approx(int(y[:30].bincount().max()) / 30)


def test_attributes_from_features_and_from_noise(digits: Digits, relu_cnn: nn.Sequential) -> None:
    x, y = digits
    even = y % 2 == 0
    found = features(relu_cnn, x)
    real = infer_attribute(found[:800], even[:800], found[800:1400], even[800:1400])
    assert real.balanced_accuracy > 0.85
    assert real.auc > 0.9
    assert real.advantage == pytest.approx(real.accuracy - real.constant_guess)
    noise = torch.randn((1400, 20), generator=_rng())
    nothing = infer_attribute(noise[:800], even[:800], noise[800:], even[800:1400])
    assert nothing.balanced_accuracy == pytest.approx(0.5, abs=0.08)


def test_an_imbalanced_attribute_is_not_flattered() -> None:
    rng = _rng(3)
    attribute = torch.rand(2000, generator=rng) < 0.1
    noise = torch.randn((2000, 5), generator=rng)
    result = infer_attribute(noise[:1000], attribute[:1000], noise[1000:], attribute[1000:])
    assert result.accuracy > 0.85
    assert result.balanced_accuracy == pytest.approx(0.5, abs=0.05)
    assert result.advantage == pytest.approx(0, abs=0.02)
    with pytest.raises(ConfigError, match="both values"):
        infer_attribute(noise[:10], torch.ones(10, dtype=torch.bool), noise[10:20], attribute[10:20])


def _small() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def test_a_student_learns_from_a_victims_answers(digits: Digits) -> None:
    x, y = digits
    victim = _small()
    fit(victim, x[:700], y[:700], _rng(), Fitting(15))
    student, scores = KnowledgeExtraction(epochs=25).run(victim, _small, x[700:1300], (x[1300:], y[1300:]), _rng(1))
    assert scores.victim_accuracy > 0.85
    assert scores.agreement > 0.8
    assert scores.student_accuracy > 0.75
    assert scores.queries == 600
    kept = divergence(student(x[1240:1300]), victim(x[1240:1300]).softmax(1)).item()
    assert kept == pytest.approx(scores.held_out_kl, rel=1e-4)
    _, spoilt = KnowledgeExtraction(epochs=3).run(_small(), _small, x[700:800], (x[1300:], y[1300:]), _rng(1))
    assert spoilt.student_accuracy < 0.4


def test_extraction_stops_early_and_needs_held_out_queries(digits: Digits) -> None:
    x, y = digits
    victim = _small()
    _, scores = KnowledgeExtraction(epochs=50, lr=1.0, patience=2).run(victim, _small, x[:100], (x[:50], y[:50]), _rng())
    assert scores.epochs < 50
    with pytest.raises(ConfigError, match="held_out"):
        KnowledgeExtraction().run(victim, _small, x[:4], (x, y), _rng())
