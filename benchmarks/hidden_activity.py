"""How alive the final global models of runs are: the share of positive outputs of each ReLU on 2,000 test images.

python benchmarks/hidden_activity.py runs/papers/fedglp/cells/dp-fedavg-6-1 ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from fedveil.data.load import load
from fedveil.experiment.config_files import load_config
from fedveil.models.model_registry import build


def activity(run: Path) -> list[float]:
    """Share of positive outputs of each ReLU, from the input on."""
    config = load_config(run / "config.toml")
    data = load(config.data.name, config.data.data_dir, config.data.download)
    network = build(config.model.name, data.info.input_shape, data.info.classes, 0, **dict(config.model.options))
    network.load_state_dict(load_file(run / "model.safetensors"))
    x, shares = torch.from_numpy(data.standardise(data.x_test[:2000])), []
    with torch.no_grad():
        for layer in network:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                shares.append((x > 0).float().mean().item())
    return shares


for name in sys.argv[1:]:
    print(Path(name).name, " ".join(f"{share:.0%}" for share in activity(Path(name))))
