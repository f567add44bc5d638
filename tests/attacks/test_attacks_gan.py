from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from torch import Tensor, nn
from torch.nn import functional as F

from fedveil.attacks import Bounds, gan
from fedveil.attacks.gan import (
    Extractor,
    Fitting,
    class_scores,
    classifier_logits,
    fit,
    frechet_distance,
    from_classifier,
    from_file,
    predictions,
    split_by_class,
)
from fedveil.attacks.metrics import save_comparison
from fedveil.errors import ConfigError

SHAPE = (1, 8, 8)
BOUNDS = Bounds(SHAPE, -1.0, 1.0)


def _rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _classifier(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 32), nn.ReLU(), nn.Linear(32, 10)]
        return nn.Sequential(*layers)


def test_frechet_distance_of_gaussians_by_formula() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(400, 3)) @ rng.normal(size=(3, 3)) + 1
    b = rng.normal(size=(300, 3)) @ rng.normal(size=(3, 3))
    cov_a, cov_b = np.cov(a.T), np.cov(b.T)
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov_a + cov_b - 2 * np.real(sqrtm(cov_a @ cov_b)))
    assert frechet_distance(torch.tensor(a), torch.tensor(b)) == pytest.approx(float(expected), rel=1e-8)


def test_frechet_distance_of_equal_and_shifted_sets() -> None:
    a = torch.randn((50, 4), generator=_rng(), dtype=torch.float64)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-6)
    assert frechet_distance(a, a + 2) == pytest.approx(16, rel=1e-6)
    one = torch.tensor([[0.0], [2.0]])
    assert frechet_distance(one, 3 * one) == pytest.approx((3 - 1) ** 2 + (3 - 1) ** 2 * 2, rel=1e-6)
    with pytest.raises(ConfigError, match="one k"):
        frechet_distance(a, a[:, :2])
    with pytest.raises(ConfigError, match="finite"):
        frechet_distance(a, a * torch.nan)


def test_scores_carry_the_extractor_and_floors(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits
    real, others = split_by_class(x, y, 3)
    extractor = Extractor("pixels", lambda images: F.avg_pool2d(images, 4).flatten(1))
    scores = class_scores(others[:80], real, others, 3, extractor, lambda images: F.one_hot(torch.full((len(images),), 3), 10))
    assert scores.metric == "FD-pixels"
    assert scores.same_source < 0.2 * scores.other_class
    assert scores.class_rate == 1
    assert scores.n == 80
    with pytest.raises(ConfigError, match="at least"):
        class_scores(others[:1], real, others, 3, extractor, lambda images: images)


def test_features_of_a_file_stand_in_for_the_judge(digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    """A saved network, as Inception would be: the distance is that of its outputs, under its name."""
    images, y = digits
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 5)).requires_grad_(False)
    program = torch.export.export(network, (images[:4],), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.export.save(program, tmp_path / "five.pt2")
    given = from_file(str(tmp_path / "five.pt2"))
    assert torch.allclose(given.features(images[:10]), network(images[:10]))
    real, others = split_by_class(images, y, 3)
    scores = class_scores(real[40:80], real, others, 3, given, lambda x: torch.zeros(len(x), 10))
    assert scores.metric == "FD-five"
    assert scores.distance == pytest.approx(
        frechet_distance(network(real[40 : 40 + scores.n]), network(real[: scores.n])), rel=1e-6
    )
    (tmp_path / "text.pt").write_text("nothing")
    with pytest.raises(ConfigError, match=r"attack\.features = .*no file of torch"):
        from_file(str(tmp_path / "text.pt"))


def test_generator_shapes_and_isolation() -> None:
    config = gan.CuriousClient(private=(5,), steps=1, batch=4)
    attacker = gan.start(config, _classifier, 10, BOUNDS, _rng())
    drawn = gan.sample(attacker, torch.tensor([0, 5, 9]), _rng())
    assert drawn.shape == (3, *SHAPE)
    assert float(drawn.detach().abs().max()) <= 1
    own = torch.zeros(4, *SHAPE), torch.tensor([1, 2, 5, 3])
    with pytest.raises(ConfigError, match=r"must not own private classes.*\[5\]"):
        gan.observe(attacker, config, _classifier, _classifier().state_dict(), own, _rng())
    with pytest.raises(ConfigError, match="private classes must lie"):
        gan.start(gan.CuriousClient(private=(10,)), _classifier, 10, BOUNDS, _rng())
    with pytest.raises(ConfigError, match="draws images"):
        gan.start(gan.CuriousClient(private=(5,)), _classifier, 10, Bounds((561,)), _rng())
    with pytest.raises(ConfigError, match="divisible by 4"):
        gan.generator(Bounds((1, 30, 30)), 10, 100, _rng())


def test_observing_never_changes_the_global_model() -> None:
    config = gan.CuriousClient(private=(5,), steps=2, batch=4, train_class_head=True)
    shared = _classifier()
    state = {k: v.clone() for k, v in shared.state_dict().items()}
    own = torch.zeros(4, *SHAPE), torch.tensor([1, 2, 2, 3])
    gan.observe(gan.start(config, _classifier, 10, BOUNDS, _rng()), config, lambda: shared, state, own, _rng())
    assert all(torch.equal(v, state[k]) for k, v in shared.state_dict().items())


@pytest.mark.slow
def test_a_curious_client_learns_a_class_it_has_never_seen() -> None:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = torch.tensor(bunch.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(bunch.target)
    inputs = BOUNDS.inputs(x)
    private = 0
    own = y[:900] != private
    config = gan.CuriousClient(private=(private,), steps=50, batch=32, lr=1e-3)
    attacker = gan.start(config, _classifier, 10, BOUNDS, _rng())
    untrained = gan.generate(attacker, private, 80, _rng(2))
    model = _classifier()
    for _ in range(2):
        fit(model, inputs[:900], y[:900], _rng(3), Fitting(5))
        gan.observe(attacker, config, _classifier, model.state_dict(), (inputs[:900][own], y[:900][own]), _rng(4))
    judge = _classifier(seed=9)
    fit(judge, inputs[900:], y[900:], _rng(5), Fitting(12))
    assert float((predictions(judge, inputs[:900]).argmax(1) == y[:900]).double().mean()) > 0.9
    real, others = split_by_class(x, y, private)
    extractor, logits = from_classifier("digits", judge, BOUNDS.inputs), classifier_logits(judge, BOUNDS.inputs)
    before = class_scores(untrained, real, others, private, extractor, logits)
    after = class_scores(gan.generate(attacker, private, 80, _rng(2)), real, others, private, extractor, logits)
    assert after.class_rate > 0.5 > before.class_rate
    assert after.distance < 0.7 * before.distance
    assert after.same_source < after.distance
    assert after.metric == "FD-digits"


def test_pictures_are_written(tmp_path: Path, digits: tuple[Tensor, Tensor]) -> None:
    x, _ = digits
    path = save_comparison(tmp_path / "row.png", x[:3], [("other digits", x[3:6]), ("same", x[:3])], "test")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
    assert path.stat().st_mode & 0o077 == 0, "examples are for their owner alone"
    with pytest.raises(ConfigError, match="1 or 3"):
        save_comparison(tmp_path / "no.png", torch.zeros(2, 2, 8, 8), [("a", x[:2])])
    with pytest.raises(ConfigError, match="one shape"):
        save_comparison(tmp_path / "no.png", x[:2], [("a", x[:3])])
