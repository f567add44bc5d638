"""The attacks on real digits, at the budget of a test; docs/attacks.md has the figures at full length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks import (
    DLG,
    IDLG,
    IG,
    Attack,
    AttackStep,
    Bounds,
    CapturedUpload,
    Clip,
    GradInversion,
    Knowledge,
    KnownTraining,
    Reconstruction,
    attack,
)
from fedveil.attacks.metrics import matched, psnr
from fedveil.attacks.reconstruction import disagreement, statistics_distance
from fedveil.errors import ConfigError

BOUNDS = Bounds((1, 28, 28))
Digits = tuple[Tensor, Tensor]
Make = Callable[..., CapturedUpload]


def _run(
    config: Attack,
    sent: CapturedUpload,
    net: nn.Module,
    knowledge: Knowledge,
    seed: int = 0,
    **more: Callable[[AttackStep], None],
) -> Reconstruction:
    return config.run([sent], lambda: net, net.state_dict(), knowledge, BOUNDS, torch.Generator().manual_seed(seed), **more)


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "images"), [("dlg", 1), ("idlg", 1), pytest.param("dlg", 2, marks=pytest.mark.slow)])
def test_dlg_on_a_sigmoid_network(
    kind: str, images: int, digits: Digits, sigmoid_lenet: nn.Sequential, make_upload: Make
) -> None:
    x, y = digits
    for i in range(images):
        config = attack(kind, steps=60, restarts=1, tolerance=1e-7)
        result = _run(config, make_upload(sigmoid_lenet, x[i : i + 1], y[i : i + 1]), sigmoid_lenet, Knowledge(n=1))
        assert psnr(result.images, x[i : i + 1]).item() > 40
        assert result.y.tolist() == [y[i]]
        assert result.steps_per_second > 0


@pytest.mark.slow
def test_a_small_gradient_tells_as_much_as_a_large_one(digits: Digits, sigmoid_lenet: nn.Sequential, make_upload: Make) -> None:
    """A clip makes gradients small, not secret: the matching loss is in units of the gradient."""
    x, y = digits
    sent = make_upload(sigmoid_lenet, x[:1], y[:1])

    def found(kind: str, norm: float, **settings: int) -> Tensor:
        scaled = CapturedUpload({k: norm / (sent.signal_norm or 0.0) * v for k, v in sent.tensors.items()})
        return _run(attack(kind, **settings), scaled, sigmoid_lenet, Knowledge(labels=y[:1], clip=Clip(norm))).images

    assert psnr(found("dlg", 1e-3, steps=30, restarts=1), x[:1]).item() > 40
    one, small = (found("gradinversion", norm, steps=15, seeds=1) for norm in (1.0, 1e-3))
    assert torch.allclose(one, small, atol=1e-3)


def test_ig_on_a_relu_network(digits: Digits, relu_cnn: nn.Sequential, make_upload: Make) -> None:
    x, y = digits
    seen: list[AttackStep] = []
    result = _run(IG(200), make_upload(relu_cnn, x[:1], y[:1]), relu_cnn, Knowledge(n=1), on_step=seen.append)
    assert psnr(result.images, x[:1]).item() > 30
    assert [p.step for p in seen] == list(range(1, 201))
    assert seen[-1].loss < 0.01 < seen[0].loss
    assert result.summary()["settings"] == {"steps": 200, "restarts": 1, "lr": 0.1, "tv": 1e-3}


def test_the_same_seed_gives_the_same_reconstruction(digits: Digits, relu_cnn: nn.Sequential, make_upload: Make) -> None:
    sent = make_upload(relu_cnn, digits[0][:1], digits[1][:1])
    first, second, other = (_run(IG(20), sent, relu_cnn, Knowledge(n=1), seed=s).x for s in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_noise_without_knowledge_hides_and_one_clean_layer_gives_away(
    digits: Digits, relu_cnn: nn.Sequential, make_upload: Make
) -> None:
    x, y = digits
    noisy = {k: 0.1 for k, _ in relu_cnn.named_parameters() if not k.startswith("5.")}
    sent = make_upload(relu_cnn, x[:1], y[:1], noisy)
    assert sent.noise_ratio is not None
    assert sent.noise_ratio > 1
    naive = _run(IG(200), sent, relu_cnn, Knowledge(n=1, labels=y[:1]))
    adaptive = _run(IG(200), sent, relu_cnn, Knowledge(n=1, labels=y[:1], noise_std=sent.noise_std))
    assert psnr(naive.images, x[:1]).item() < 12
    assert psnr(adaptive.images, x[:1]).item() > 30
    assert adaptive.adaptive
    assert "noise_std" in adaptive.knowledge
    assert not naive.adaptive


@pytest.mark.slow
def test_a_known_mask_is_left_out(digits: Digits, relu_cnn: nn.Sequential, make_upload: Make) -> None:
    x, y = digits
    sent = make_upload(relu_cnn, x[:1], y[:1])
    keep = {k: torch.rand(v.shape, generator=torch.Generator().manual_seed(1)) < 0.5 for k, v in sent.tensors.items()}
    masked = CapturedUpload({k: v * keep[k] for k, v in sent.tensors.items()})
    informed = _run(IG(200), masked, relu_cnn, Knowledge(labels=y[:1], mask=keep))
    naive = _run(IG(200), masked, relu_cnn, Knowledge(labels=y[:1]))
    assert psnr(informed.images, x[:1]).item() > 30 > psnr(naive.images, x[:1]).item()


@pytest.mark.slow
def test_adaptive_dlg(digits: Digits, sigmoid_lenet: nn.Sequential, make_upload: Make) -> None:
    x, y = digits
    sent = make_upload(sigmoid_lenet, x[:1], y[:1], {"0.weight": 1.0, "0.bias": 1.0})
    naive = _run(DLG(10, 1), sent, sigmoid_lenet, Knowledge(labels=y[:1]))
    adaptive = _run(DLG(25, 1), sent, sigmoid_lenet, Knowledge(labels=y[:1], noise_std=sent.noise_std))
    assert psnr(adaptive.images, x[:1]).item() > 20 > psnr(naive.images, x[:1]).item()


@pytest.mark.slow
def test_dlg_from_weights_needs_the_local_training(digits: Digits, sigmoid_lenet: nn.Sequential, make_upload: Make) -> None:
    x, y = digits
    clean = make_upload(sigmoid_lenet, x[:1], y[:1]).tensors
    weights = CapturedUpload({k: v - 0.05 * clean[k] for k, v in sigmoid_lenet.state_dict().items()}, kind="weights")
    result = _run(IDLG(30, 1), weights, sigmoid_lenet, Knowledge(local=KnownTraining(1, 0.05)))
    assert psnr(result.images, x[:1]).item() > 35
    with pytest.raises(ConfigError, match=r"Knowledge\.local"):
        _run(IDLG(1), weights, sigmoid_lenet, Knowledge())


@pytest.mark.slow
def test_unrolling_local_steps_beats_assuming_one(digits: Digits, relu_cnn: nn.Sequential) -> None:
    x, y = digits
    net = nn.Sequential(*relu_cnn)
    start = {k: v.clone() for k, v in net.state_dict().items()}
    local = KnownTraining(4, 0.1)
    optimizer = torch.optim.SGD(net.parameters(), local.lr)
    for _ in range(local.steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x[:1]), y[:1]).backward()
        optimizer.step()
    delta = CapturedUpload({k: v.clone() - start[k] for k, v in net.state_dict().items()}, kind="delta")
    net.load_state_dict(start)
    knowledge = Knowledge(labels=y[:1], local=local)
    unrolled = _run(IG(200), delta, net, knowledge)
    assumed = _run(IG(200), delta, net, Knowledge(labels=y[:1], local=KnownTraining(1, 0.4)))
    assert psnr(unrolled.images, x[:1]).item() > 30
    assert psnr(unrolled.images, x[:1]).item() > psnr(assumed.images, x[:1]).item() + 5
    assert unrolled.trial_losses[0] < 0.01 < assumed.trial_losses[0]


@pytest.mark.slow
def test_gradinversion_on_a_batch(digits: Digits, relu_cnn: nn.Sequential, make_upload: Make) -> None:
    x, y = digits
    sent = make_upload(relu_cnn, x[:2], y[:2])
    result = _run(GradInversion(300, 2, unique=True), sent, relu_cnn, Knowledge(n=2))
    assert result.y.tolist() == sorted(y[:2].tolist())
    assert len(result.trial_losses) == 2
    assert psnr(matched(result.images, x[:2]), x[:2]).min().item() > 20


@pytest.mark.slow
def test_two_noisy_uploads_of_the_same_examples_help(digits: Digits, relu_cnn: nn.Sequential, make_upload: Make) -> None:
    x, y = digits
    noisy = {k: 0.02 for k, _ in relu_cnn.named_parameters()}
    sent = [make_upload(relu_cnn, x[:1], y[:1], noisy, seed) for seed in range(4)]
    one, all_of_them = (
        IG(100).run(s, lambda: relu_cnn, relu_cnn.state_dict(), Knowledge(labels=y[:1]), BOUNDS, torch.Generator().manual_seed(0))
        for s in (sent[:1], sent)
    )
    assert psnr(all_of_them.images, x[:1]).item() > psnr(one.images, x[:1]).item() + 2


def test_statistics_distance_is_zero_on_the_batch_that_made_them() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, momentum=1.0), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2))
    x = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        first = net[0](x)
        net[1].running_mean.copy_(first.mean((0, 2, 3)))
        net[1].running_var.copy_(first.var((0, 2, 3), unbiased=False))
        net.eval()
        second = net[3](net[2](net[1](first)))
        net[4].running_mean.copy_(second.mean((0, 2, 3)))
        net[4].running_var.copy_(second.var((0, 2, 3), unbiased=False))
    assert statistics_distance(net, x).item() == pytest.approx(0, abs=1e-4)
    net[1].running_mean += 0.1
    shift = 0.1 * 3**0.5
    assert statistics_distance(net, x).item() >= 10 * shift - 1e-4
    assert statistics_distance(nn.Linear(2, 2), torch.zeros(1, 2)).item() == 0


def test_disagreement_by_hand() -> None:
    x = torch.tensor([[[0.0, 0.0]], [[6.0, 8.0]]])
    assert disagreement(x).item() == pytest.approx(10, abs=1e-3)


@pytest.mark.slow
def test_ig_on_colour_images(data_dir: object) -> None:
    from fedveil.data.load import load

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 5, 1, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8192, 10)]
    net = nn.Sequential(*layers)
    data = load("cifar10", download=False)
    bounds = Bounds((3, 32, 32), (-2.0,) * 3, (2.0,) * 3)
    truth, y = torch.from_numpy(data.x_test[:4]).float() / 255, torch.from_numpy(data.y_test[:4])
    scores = []
    for i in range(4):
        net.zero_grad()
        F.cross_entropy(net(bounds.inputs(truth[i : i + 1])), y[i : i + 1]).backward()
        sent = CapturedUpload({k: p.grad.clone() for k, p in net.named_parameters() if p.grad is not None})
        rng = torch.Generator().manual_seed(i)
        result = IG(500).run([sent], lambda: net, net.state_dict(), Knowledge(n=1), bounds, rng)
        scores.append(psnr(result.images, truth[i : i + 1]).item())
    assert sorted(scores)[1] > 28
