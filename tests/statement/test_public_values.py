"""What a statement takes for public without being able to check it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import fedveil as fv
from fedveil.data.dataset import Dataset
from fedveil.experiment.recertify import recertify


def three_classes(classes: int | None) -> Dataset:
    draw = np.random.default_rng(0)
    return fv.from_arrays(draw.normal(size=(90, 2)), np.arange(90) % 3, client=np.arange(90) // 9, classes=classes)


def test_a_counted_number_of_classes_is_an_assumption(tmp_path: Path) -> None:
    config = fv.configure(
        model="linear",
        method=fv.DPFedAvg(clip=0.5),
        training={"rounds": 1, "clients_per_round": 4},
        privacy={"epsilon": 8.0, "delta": 1e-2},
        run={"engine": "inline"},
    )
    text = "the number of classes (3) is public, though it was counted in the data"
    before = fv.certify(config, data=three_classes(None))
    assert [a.what for a in before.assumptions if "counted" in a.what] == [text]
    assert not any("counted" in a.what for a in fv.certify(config, data=three_classes(3)).assumptions)

    result = fv.train(config, tmp_path / "run", data=three_classes(None))
    assert text in [a.what for a in result.privacy.assumptions]
    assert [finding.kind for finding in recertify(tmp_path / "run")] == ["verified"]


def test_clients_that_are_not_those_whom_the_data_name_are_an_assumption(tmp_path: Path) -> None:
    """Dealt out anew, one whom the data name has records with several clients: epsilon is of one of these."""

    def config(**data: object) -> fv.Config:
        return fv.configure(  # type: ignore[no-any-return]
            data=data,
            model="linear",
            method=fv.DPFedAvg(clip=0.5),
            training={"rounds": 1, "clients_per_round": 4},
            privacy={"epsilon": 8.0, "delta": 1e-2},
            run={"engine": "inline"},
        )

    def said(of: fv.Config) -> list[str]:
        return [a.what for a in fv.certify(of, data=named).assumptions if "whom the data name" in a.what]

    named = three_classes(3)
    assert said(config()) == said(config(partition={"kind": "users"})) == []
    dealt = config(partition={"kind": "iid", "clients": 5})
    (text,) = said(dealt)
    assert f"data.partition.kind = 'iid' made, and none of the {named.info.users} clients" in text
    result = fv.train(dealt, tmp_path / "run", data=named)
    assert result.privacy == fv.certify(dealt, data=named)
    assert [finding.kind for finding in recertify(tmp_path / "run")] == ["verified"]
