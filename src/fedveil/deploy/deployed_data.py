"""Data of a run over several machines: the server has what is public, each client its own examples, and nobody both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.data.dataset import Dataset, standardise
from fedveil.data.load import load
from fedveil.data.own.data_source import TableSource
from fedveil.data.partition import ClientIndices, Partition
from fedveil.data.split import client_test_split
from fedveil.errors import ConfigError
from fedveil.experiment.assembly import Prepared, placeholders, prepare
from fedveil.federation.clients import Clients
from fedveil.methods.method import weighting_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedveil.experiment.experiment import DataSpec, Experiment


def public_part(experiment: Experiment) -> Prepared:
    """Return the server's data: the public test set, and no example of any client.

    The numbers of clients and of their examples are read from the configuration, not counted. With `data.source` only its test
    file is opened, and without one the test set is empty, if clients score the model; otherwise the data set of the catalogue
    is loaded, and its test set is used.

    Raises:
        ConfigError: the test set is missing, public data would be taken from the clients' examples, or clients would be weighted
            by their number of examples.
    """
    spec, method = experiment.data, experiment.method
    if weighting_of(method) == "examples":
        raise ConfigError(
            f"method.weighting = 'examples' in {method.name}: over several machines sites do not reveal their sizes. Set "
            f'method.weighting = "uniform", or choose a method that has it'
        )
    if spec.section.public_fraction:
        raise ConfigError(
            f"data.public_fraction = {spec.section.public_fraction:g} takes examples of the training set, and over several "
            f"machines nobody has that: leave it out"
        )
    if spec.section.source is None:
        dataset = load(spec.section.name, spec.section.data_dir, spec.section.download)
        if (features := spec.features) is not None:
            dataset = features.of(dataset)
    else:
        test = _table(spec).test_file
        if test is None and experiment.setting.evaluation is None:
            raise ConfigError(
                "data.source.test_file: missing; over several machines the server has a public one of its own, or clients score "
                "the model on examples of theirs, with noise: set data.source.test_file, or privacy.evaluation"
            )
        if test is None:
            prepared = empty_client_data(experiment)
            return replace(prepared, test=(prepared.test[0][:0], prepared.test[1][:0]))
        dataset = _only(spec, test)
    return _prepared(experiment, dataset, {})


def client_data(
    experiment: Experiment, client: int, file: str | None, tell: Callable[[str], None] = lambda line: None, *, part: bool = False
) -> Prepared:
    """Return the data of client number `client`: its own examples and no others.

    Args:
        file: replaces the file of `data.source`, and belongs to this client alone. None: its part of the configured partition.
        part: with a file, only its part of the configured partition belongs to this client.
        tell: called with a line about rows that are left out.

    Raises:
        ConfigError, DataError: such data do not exist.
    """
    spec = experiment.data
    if file is None or part:
        if file is not None:
            source = _table(spec).model_copy(update={"file": file, "test_file": file})
            spec = replace(spec, section=spec.section.model_copy(update={"source": source}))
        whole = prepare(spec)
        tests = None if whole.client_tests is None else whole.client_tests.alone(client)
        return replace(_prepared(experiment, whole.dataset, {client: whole.partition.clients[client]}), client_tests=tests)
    if experiment.setting.example_clip is not None:
        dataset, fits = _row_by_row(experiment, file, tell)
    else:
        dataset = _only(spec, file)
        fits = np.ones(len(dataset.y_train), np.bool_)
    alone = _prepared(experiment, dataset, {client: np.arange(len(fits))})
    partition, tests = alone.partition, None
    if spec.section.client_test_fraction:
        partition, test_parts = client_test_split(partition, spec.section.client_test_fraction, seed=spec.seed)
        counts = experiment.setting.evaluation
        held = test_parts[client][: None if counts is None else counts.examples]
        valid = _indices(experiment, {client: held[fits[held]]})
        tests = Clients.of(dataset.standardise(dataset.x_train), dataset.y_train, valid)
    indices = partition.clients[client]
    if experiment.setting.example_clip is not None:
        indices = indices[: experiment.setting.example_cap]  # before invalid rows are left out, which would let others move up
    return replace(_prepared(experiment, dataset, {client: indices[fits[indices]]}), client_tests=tests)


def _row_by_row(experiment: Experiment, file: str, tell: Callable[[str], None]) -> tuple[Dataset, NDArray[np.bool_]]:
    """Return all rows of a client's own file, and whether each is valid; invalid rows keep their places, and hold zeros.

    DP-SGD assumes that a record affects only its own gradient. If the file were checked as a whole, one invalid value, or one on
    which the network fails in the rehearsal, would keep all rows from training. So an invalid row is nobody's example.
    """
    info, source = experiment.population.data, _of_client(experiment.data, file)
    rows = list(source.rows())
    x, y = placeholders(info, len(rows))
    for i, row in enumerate(rows):
        if not isinstance(row, str):
            x[i], y[i] = row
    with np.errstate(over="ignore"):
        finite = np.isfinite(standardise(x, info)).reshape(len(x), -1).all(1)
    x[~finite] = 0
    fits = finite & np.array([not isinstance(row, str) for row in rows])
    if not fits.all():
        row = rows[int(fits.argmin())]
        why = row if isinstance(row, str) else "numbers beyond float32 when they are normalised"
        tell(f"{(~fits).sum()} of {len(fits)} rows are not as the configuration says, and take no part; the first: {why}")
    return Dataset(info, x, y, *placeholders(info, 1)), fits


def empty_client_data(experiment: Experiment) -> Prepared:
    """Return the data of a client whose examples are invalid: none, so that it releases zero with noise."""
    info = experiment.population.data
    x, y = placeholders(info, 1)
    return _prepared(experiment, Dataset(info, x, y, x, y), {})


def _prepared(experiment: Experiment, dataset: Dataset, parts: dict[int, NDArray[np.int64]]) -> Prepared:
    partition = Partition(_indices(experiment, parts), experiment.data.section.partition["kind"], experiment.seed)
    clients = Clients.of(dataset.standardise(dataset.x_train), dataset.y_train, partition.clients)
    test = torch.from_numpy(dataset.standardise(dataset.x_test)), torch.from_numpy(dataset.y_test)
    return Prepared(dataset, partition, clients, None, test, None, experiment.population)


def _indices(experiment: Experiment, parts: dict[int, NDArray[np.int64]]) -> ClientIndices:
    """Return the examples of these clients; all others have none."""
    each = [parts.get(c, np.empty(0, np.int64)) for c in range(experiment.population.clients)]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in each])]).astype(np.int64)
    return ClientIndices(np.concatenate(each), offsets)


def _table(spec: DataSpec) -> TableSource:
    source = spec.section.source
    if not isinstance(source, TableSource):
        raise ConfigError(
            f"data.name = {spec.section.name!r}: over several machines each with files of its own, data.source must be a table; "
            f"data of fedveil itself can be divided among them (data.part in the consent)"
        )
    return source


def _of_client(spec: DataSpec, file: str) -> TableSource:
    """Return a file as source with the columns of `data.source`, both for training and for testing."""
    return _table(spec).model_copy(update={"file": file, "test_file": file, "client": None})


def _only(spec: DataSpec, file: str) -> Dataset:
    """Return all rows of such a file."""
    return _of_client(spec, file).examples(spec.section.name)
