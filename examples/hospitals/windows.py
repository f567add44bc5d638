"""What a window of signals tells at a glance: a public function of each window by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def statistics(windows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Mean, spread, mean step and power in eight bands of each signal: [n, 9, 128] to [n, 99]."""
    centred = windows - windows.mean(axis=2, keepdims=True)
    steps = np.abs(np.diff(windows, axis=2)).mean(axis=2)
    power = np.abs(np.fft.rfft(centred, axis=2))[:, :, 1:33] / windows.shape[2]
    bands = power.reshape(*windows.shape[:2], 8, 4).mean(axis=3).reshape(len(windows), -1)
    parts = [windows.mean(axis=2), windows.std(axis=2), 4 * steps, 4 * bands]
    return np.concatenate(parts, axis=1).astype(np.float32)
