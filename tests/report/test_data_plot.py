"""The figure holds the numbers of the partition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedveil.data.partition import Partition, partition
from fedveil.data.split import client_test_split
from fedveil.errors import ConfigError
from fedveil.report import figures as plot
from fedveil.report.figures import plot_partition

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), 400))


def partition_of(clients: int, alpha: float = 0.5) -> Partition:
    return partition("dirichlet", LABELS, clients=clients, alpha=alpha, too_small="top-up", seed=1)


@pytest.mark.few(3)
@pytest.mark.parametrize("clients", [1, 2, 20, 60, 61, 1000])
def test_a_figure_is_written(tmp_path: Path, clients: int) -> None:
    train, test = client_test_split(partition_of(clients), 0.2, seed=1)
    plot_partition(train, LABELS, 5, tmp_path / "p.png", test=test)
    with Image.open(tmp_path / "p.png") as picture:
        assert 800 < picture.width < 2500
        assert 500 < picture.height < 1700
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 20


def test_dots_have_areas_in_proportion_to_counts() -> None:
    part = partition_of(12)
    names = tuple("abcde")
    figure = plot._figure(part, plot._table(part, LABELS, names, None))
    dots = figure.axes[0].collections[0]
    counts = part.label_counts(LABELS, 5)
    clients, labels = np.nonzero(counts)
    assert np.array_equal(dots.get_offsets(), np.stack([clients, labels], axis=1))
    values, areas = counts[clients, labels], dots.get_sizes()
    large = areas > 1.5
    assert large.sum() > 20
    assert np.ptp(areas[large] / values[large]) < 1e-9
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == list(names)
    assert [bar.get_height() for bar in figure.axes[1].patches] == part.sizes.tolist()
    assert [bar.get_width() for bar in figure.axes[2].patches] == [400] * 5


@pytest.mark.parametrize("clients", [100, 700])
def test_the_map_holds_averages_of_shares(clients: int) -> None:
    part = partition_of(clients)
    figure = plot._figure(part, plot._table(part, LABELS, tuple("abcde"), None))
    drawn = np.asarray(figure.axes[0].collections[0].get_array()).reshape(5, -1)
    assert drawn.shape[1] == min(clients, plot.COLUMNS)
    assert np.allclose(drawn.sum(axis=0), 1)
    counts = part.label_counts(LABELS, 5)
    shares = counts / counts.sum(axis=1, keepdims=True)
    widths = np.diff(np.arange(drawn.shape[1] + 1) * clients // drawn.shape[1])
    assert np.allclose((drawn * widths).sum(axis=1), shares.sum(axis=0))
    tops = shares.argmax(axis=1)
    assert np.array_equal(tops[plot._table(part, LABELS, tuple("abcde"), None).order], np.sort(tops))


@pytest.mark.parametrize("clients", [5, 100])
def test_the_curious_client_is_marked(tmp_path: Path, clients: int) -> None:
    part = partition("private-label-isolation", LABELS, clients=clients, private_label=2, curious=3, seed=1)
    table = plot._table(part, LABELS, tuple("abcde"), None)
    figure = plot._figure(part, table)
    centre = np.mean([line.get_xdata()[0] for line in figure.axes[0].lines])
    column = int(centre) if clients == 100 else round(centre)
    assert table.order[column] == 3
    plot_partition(part, LABELS, 5, tmp_path / "p.svg")
    assert "curious client" in (tmp_path / "p.svg").read_text()


def test_clients_without_examples_are_drawn(tmp_path: Path) -> None:
    for clients in (30, 90):
        part = partition("dirichlet", LABELS, clients=clients, alpha=0.01, min_size=0, seed=1)
        assert part.sizes.min() == 0
        plot_partition(part, LABELS, 5, tmp_path / "p.png")


def test_bad_paths(tmp_path: Path) -> None:
    for path, message in (("p.gif", "ends in .png, .svg or .pdf"), ("missing/p.png", "does not exist")):
        with pytest.raises(ConfigError, match=message):
            plot_partition(partition_of(3), LABELS, 5, tmp_path / path)
