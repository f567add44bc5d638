"""Functions of yeast genes: multi-label, each gene a client."""

from __future__ import annotations

from pathlib import Path

import pytest

from example_runs import example, short_run


@pytest.mark.slow
@pytest.mark.heavy
def test_functions_of_genes_are_predicted_better_than_by_none(tmp_path: Path) -> None:
    module = example("yeast", "river")
    data = module.load()
    assert len(data.y_train) == data.info.users  # client level is record level
    assert data.info.target.shape == (14,)
    last = short_run(module, data, tmp_path, 12).history[-1]
    assert last["test_hamming"] < 0.93 * last["test_all_zero"]
    assert last["test_auc"] > 0.58
