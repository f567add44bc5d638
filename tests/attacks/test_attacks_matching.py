from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedveil.attacks.attack_types import CapturedUpload, Clip, Knowledge, KnownTraining
from fedveil.attacks.matching import Target, cosine, read, split, squared, trust, withheld_guess
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan
from fedveil.release.sealed import clipped
from method_kit import layout as layout_of


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))


STATE = _net().state_dict()
RNG = torch.Generator().manual_seed(5)
GRADIENT = {k: torch.randn(v.shape, generator=RNG) for k, v in STATE.items()}


def _target(gradient: list[float], weight: list[float] | None) -> Target:
    return Target(_net(), torch.tensor(gradient), None if weight is None else torch.tensor(weight), lambda x, y: x)


def test_distances_by_hand() -> None:
    candidate = torch.tensor([1.0, 0.0, 2.0])
    assert squared(_target([3.0, 4.0, 0.0], None), candidate).item() == pytest.approx(4 + 16 + 4)
    assert cosine(_target([3.0, 4.0, 0.0], None), candidate).item() == pytest.approx(1 - 3 / (5 * math.sqrt(5)))


def test_excluded_coordinates_leave_numerator_and_norms() -> None:
    target = _target([3.0, 4.0, 100.0], [1.0, 1.0, 0.0])
    candidate = torch.tensor([6.0, 8.0, -50.0])
    assert cosine(target, candidate).item() == pytest.approx(0, abs=1e-6)
    assert squared(target, candidate).item() == pytest.approx(9 + 16)
    assert float(target.power()) == pytest.approx(25)


def test_weights_enter_the_inner_product_once() -> None:
    target, candidate = _target([1.0, 1.0], [1.0, 0.25]), torch.tensor([1.0, -1.0])
    assert cosine(target, candidate).item() == pytest.approx(1 - 0.75 / 1.25)
    assert squared(target, candidate).item() == pytest.approx(0.25 * 4)


@pytest.mark.parametrize("steps", [1, 5])
def test_gradient_delta_and_weights_say_the_same(steps: int) -> None:
    lr = 0.2
    moved = {k: -lr * steps * g for k, g in GRADIENT.items()}
    knowledge = Knowledge(local=KnownTraining(steps, lr))
    uploads = [
        CapturedUpload(GRADIENT),
        CapturedUpload(moved, kind="delta"),
        CapturedUpload({k: STATE[k] + v for k, v in moved.items()}, kind="weights"),
    ]
    plain, delta, weights = (t.gradient for t in read(uploads, _net, STATE, knowledge))
    assert torch.allclose(plain, delta, atol=1e-6)
    assert torch.allclose(plain, weights, atol=1e-5)


def test_noise_of_a_delta_is_scaled_to_the_gradient() -> None:
    local = KnownTraining(4, 0.05)
    std = {"0.weight": 0.1, "2.weight": 0.01}
    as_delta = {k: -0.2 * g for k, g in GRADIENT.items()}
    delta = read(
        [CapturedUpload(as_delta, kind="delta")],
        _net,
        STATE,
        Knowledge(local=local, noise_std={k: 0.2 * s for k, s in std.items()}),
    )
    plain = read([CapturedUpload(GRADIENT)], _net, STATE, Knowledge(noise_std=std))
    assert delta[0].weight is not None
    assert plain[0].weight is not None
    assert torch.allclose(delta[0].weight, plain[0].weight, atol=1e-5)


def test_a_candidate_passes_the_clip_as_an_update_does() -> None:
    """Against the door's own clipping, on the same change of weights."""
    x, y, lr = torch.randn((4, 2), generator=RNG), torch.tensor([0, 1, 1, 0]), 0.5
    plain = read([CapturedUpload(GRADIENT)], _net, STATE, Knowledge())[0].simulate(x, y).detach()
    layout = layout_of({k: tuple(v.shape) for k, v in STATE.items()})
    norms = layout.norms(lr * plain)
    support = torch.ones_like(plain, dtype=torch.bool)
    support[:3] = False
    plan = Plan(clip=0.6 * float(norms.norm()), layer_clip=torch.tensor([0.5, 2.0, 0.9, 1.0]) * norms, support=support)
    expected = clipped(-lr * plain, plan, layout) / -lr
    clip = Clip(plan.clip, dict(zip(layout.names, plan.layer_clip.tolist(), strict=True)))
    knowledge = Knowledge(local=KnownTraining(1, lr), clip=clip, mask=split(support, dict(STATE)))
    target = read([CapturedUpload({k: -lr * g for k, g in GRADIENT.items()}, kind="delta")], _net, STATE, knowledge)[0]
    assert torch.allclose(target.simulate(x, y).detach(), expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(plain, expected, rtol=0.05)


def test_layers_that_were_not_sent_do_not_count() -> None:
    target = read([CapturedUpload({k: v for k, v in GRADIENT.items() if k != "0.weight"})], _net, STATE, Knowledge())[0]
    assert target.weight is not None
    assert target.weight[:6].tolist() == [0.0] * 6
    assert target.weight[6:].tolist() == [1.0] * 11


def test_trust_is_signal_over_signal_and_noise() -> None:
    parameters = {"a": torch.zeros(2), "b": torch.zeros(2)}
    received = torch.tensor([1.0, 1.0, 2.0, 2.0])
    weight = trust(received, parameters, {"a", "b"}, Knowledge(noise_std={"b": torch.tensor([0.5, 0.1])}))
    power = 4 - 0.01
    assert weight is not None
    assert weight.tolist() == pytest.approx([1.0, 1.0, power / (0.25 + power), power / (0.01 + power)])


@pytest.mark.parametrize("size", [1, 10, 1000])
def test_noise_in_a_small_tensor_is_rarely_taken_for_signal(size: int) -> None:
    """At most 1 in 4,300 by the rule; two standard errors would let some 4 % of ten entries pass."""
    rng = torch.Generator().manual_seed(0)
    parameters, knowledge = {"a": torch.zeros(1), "b": torch.zeros(size)}, Knowledge(noise_std={"b": 3.0})
    passed = 0
    for _ in range(1000):
        weight = trust(torch.cat([torch.ones(1), 3 * torch.randn(size, generator=rng)]), parameters, {"a", "b"}, knowledge)
        assert weight is not None
        passed += int(weight[1] > 0)
    assert passed <= 4


def test_signal_is_estimated_where_there_is_no_noise() -> None:
    """Noise on the largest entries alone must not hide the tensor's clean ones."""
    parameters, std = {"a": torch.zeros(4)}, torch.tensor([0.0, 0.0, 0.0, 100.0])
    weight = trust(torch.tensor([2.0, 2.0, 2.0, 150.0]), parameters, {"a"}, Knowledge(noise_std={"a": std}))
    assert weight is not None
    assert weight.tolist() == pytest.approx([1.0, 1.0, 1.0, 4 / 10_004])


def test_only_noise_is_seen_as_swamped() -> None:
    rng = torch.Generator().manual_seed(0)
    parameters = {"a": torch.zeros(1), "b": torch.zeros(20_000)}
    for signal, swamped in ((0.0, True), (0.3, False)):
        noisy = signal + torch.randn(20_000, generator=rng)
        weight = trust(torch.cat([torch.ones(1), noisy]), parameters, {"a", "b"}, Knowledge(noise_std={"b": 1.0}))
        assert weight is not None
        expected = 0.0 if swamped else 0.09 / 1.09
        assert weight[1].item() == pytest.approx(expected, rel=0.25)


def test_swamped_layers_get_no_weight_unless_all_are_alike() -> None:
    parameters = {"a": torch.zeros(2), "b": torch.zeros(2)}
    received = torch.tensor([1.0, 1.0, 3.0, 3.0])
    one = trust(received, parameters, {"a", "b"}, Knowledge(noise_std={"b": 10.0}))
    both = trust(received, parameters, {"a", "b"}, Knowledge(noise_std={"a": 10.0, "b": 10.0}))
    assert one is not None
    assert both is not None
    assert one.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert both.tolist() == [1.0] * 4


def test_known_masks_exclude_entries() -> None:
    mask = {"0.weight": torch.tensor([[True, False], [False, True], [True, True]])}
    target = read([CapturedUpload(GRADIENT)], _net, STATE, Knowledge(mask=mask))[0]
    assert target.weight is not None
    assert target.weight[:6].tolist() == [1, 0, 0, 1, 1, 1]


def test_withheld_guess_drops_the_largest_received() -> None:
    upload = CapturedUpload({"a": torch.tensor([0.1, -9.0, 0.3, 0.2, 0.5]), "b": torch.tensor([1.0, 0.0, 7.0, 0.4, 0.6])})
    guess = withheld_guess(upload, 0.2)
    assert guess["a"].tolist() == [True, False, True, True, True]
    assert guess["b"].tolist() == [True, True, False, True, True]
    with pytest.raises(ConfigError, match="fraction"):
        withheld_guess(upload, 1.0)


def test_what_cannot_be_read_is_refused() -> None:
    cases: list[tuple[CapturedUpload, Knowledge, str]] = [
        (CapturedUpload({"nope": torch.zeros(1)}), Knowledge(), "nope"),
        (CapturedUpload({"0.bias": torch.zeros(4)}), Knowledge(), "shape"),
        (CapturedUpload(GRADIENT, kind="delta"), Knowledge(), "Knowledge.local"),
        (CapturedUpload(GRADIENT), Knowledge(mask={k: torch.zeros(v.shape) for k, v in GRADIENT.items()}), "mask hides"),
        (CapturedUpload(GRADIENT), Knowledge(noise_std={"0.weight": torch.ones(7)}), "does not fit"),
    ]
    for upload, knowledge, words in cases:
        with pytest.raises(ConfigError, match=words):
            read([upload], _net, STATE, knowledge)
    with pytest.raises(ConfigError, match="at least one"):
        read([], _net, STATE, Knowledge())


def test_named_gives_tensors_back() -> None:
    named: dict[str, Tensor] = read([CapturedUpload(GRADIENT)], _net, STATE, Knowledge())[0].named()
    assert all(torch.equal(named[k], v) for k, v in GRADIENT.items())
