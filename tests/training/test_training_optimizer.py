"""The optimisers of flat vectors are torch's, without what torch imports for them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fedveil.training.optimizer import OptimizerSpec


@pytest.mark.parametrize(
    ("spec", "theirs"),
    [
        (OptimizerSpec(lr=0.3), lambda p: torch.optim.SGD(p, 0.3)),
        (OptimizerSpec(lr=0.3, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.3, weight_decay=0.1)),
        (OptimizerSpec(lr=0.3, momentum=0.9), lambda p: torch.optim.SGD(p, 0.3, momentum=0.9)),
        (OptimizerSpec("adam", 0.01), lambda p: torch.optim.Adam(p, 0.01, foreach=False)),
        (OptimizerSpec("adam", 0.01, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1, foreach=False)),
    ],
)
@pytest.mark.heavy
def test_steps_are_those_of_torch_to_the_bit_also_when_stored_in_between(spec: OptimizerSpec, theirs) -> None:  # type: ignore[no-untyped-def]
    rng = torch.Generator().manual_seed(0)
    ours = torch.randn(50, generator=rng)
    parameter = torch.nn.Parameter(ours.clone())
    optimizer, torchs = spec.build(), theirs([parameter])
    for _ in range(5):
        gradient = torch.randn(50, generator=rng)
        parameter.grad = gradient.clone()
        torchs.step()
        optimizer.step(ours, gradient)
        optimizer = spec.build({k: v.clone() for k, v in optimizer.state.items()})
        assert torch.equal(ours, parameter.detach())


def test_the_learning_rate_of_a_step_may_be_given() -> None:
    vector = torch.zeros(2)
    OptimizerSpec(lr=1.0).build().step(vector, torch.tensor([1.0, 2.0]), 0.5)
    assert vector.tolist() == [-0.5, -1.0]


@pytest.mark.heavy
def test_a_step_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch; from fedveil.training.optimizer import OptimizerSpec;"
        "[OptimizerSpec(name).build().step(torch.zeros(3), torch.ones(3)) for name in ('sgd', 'adam')];"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
