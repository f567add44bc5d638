"""Jobs with fedveil's filter in NVFlare's simulator; the tests look at what the server received, for the simulator exits with 0
even where every result was refused."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="needs nvflare (pip install 'fedveil[nvflare]')")

from flare_jobs import Finished, ran

FILTER = """
from fedveil.deploy.nvflare import ReleaseFilter
job.to_clients(ReleaseFilter(**total), filter_type=FilterType.TASK_RESULT)
"""
NOISE = 100.0
"""More than any noise of these tests, and less than the trainer's step."""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return ran(tmp_path_factory.mktemp("honest"), FILTER)


@pytest.mark.heavy
def test_the_server_receives_releases_and_nothing_else(honest: Finished) -> None:
    assert sorted((one["site"], one["task"]) for one in honest.received) == [("site-1", "train")] * 2 + [("site-2", "train")] * 2
    for one in honest.received:
        assert "1234.5" not in str(one)
        assert list(one["body"]) == ["DXO"]
        assert one["body"]["DXO"]["meta"] == {"NUM_STEPS_CURRENT_ROUND": 1}
    assert len(honest.weights()) == 4
    moved = [np.abs(array - 100.0) for array in honest.weights()]
    assert all(0 < array.max() < NOISE for array in moved), "training moved each number by 1000, in place"
    assert all(array.shape == (2, 50) and array.dtype == np.float32 for array in honest.weights())
