"""User-supplied data in files that a configuration names, `[data.source]`.

The section states the public facts that a privacy statement needs: columns, classes, numbers of clients and training examples.
So a statement is made without reading the files, and a run checks that the files agree.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError, field_validator

from fedveil.data.catalogue import Info, Targets
from fedveil.data.dataset import Dataset
from fedveil.data.own.arrays import array_info, of_arrays
from fedveil.data.own.cards import ArrayCard, OwnCard, TableCard, checked_card
from fedveil.data.own.casts import Array, Labelled
from fedveil.data.own.files import by_folders, by_table, read_rows, read_table
from fedveil.data.own.frames import examples_of, of_table, table_info
from fedveil.errors import ConfigError, DataError, refusal

PATHS = ("file", "test_file", "images", "test_images", "table")
"""Keys that hold paths."""


def user_path(path: str) -> Path:
    """Return a path as the user means it, with ~ expanded.

    Raises:
        ConfigError: no such user, or characters that no path has, such as the line break that TOML reads in "C:\\new".
    """
    if any(ord(character) < 32 for character in path):
        raise ConfigError(
            f"{path!r} is no path: in double quotes TOML reads a backslash as an escape: use single quotes, or / in its place"
        )
    try:
        return Path(path).expanduser()
    except RuntimeError as problem:
        raise ConfigError(f"{path}: {problem}: give a path without ~") from None


def whole_path(path: str, folder: Path | None = None) -> str:
    """Make a user's path absolute, so that a run directory names the same file; a circular link stays as it is."""
    return os.path.realpath((folder or Path()) / user_path(path))


class DataSource(OwnCard):
    """Options that files of all kinds share.

    clients, train_examples: public numbers of clients and of their training examples, which determine the noise.
    classes: if left out, targets are quantities.
    """

    classes: int | tuple[Any, ...] | None = 0
    clients: int | None = Field(None, ge=1)
    train_examples: int | None = Field(None, ge=1)

    @field_validator(*PATHS, check_fields=False)
    @classmethod
    def _whole(cls, path: str | None) -> str | None:
        """Make paths absolute, so that a run directory names the same file."""
        return None if path is None else whole_path(path)

    @property
    def main(self) -> Path:
        """The file or folder that names the data if they have no other name."""
        raise NotImplementedError

    @property
    def by_client(self) -> bool:
        """Return whether the source gives the client of each example."""
        raise NotImplementedError

    def shapes(self, name: str) -> Info:
        """Return the public facts without sizes."""
        raise NotImplementedError

    def examples(self, name: str) -> Dataset:
        """Read the examples of the files, without checking their number."""
        raise NotImplementedError

    def info(self, name: str) -> Info:
        """Return the public facts, from the configuration alone.

        Raises:
            ConfigError: it lacks the numbers; the message gives them if the files exist on this machine.
        """
        if self.train_examples is None or (self.by_client and self.clients is None):
            try:
                hint = f": here they are {self._counts(self.examples(name))}"
            except DataError as problem:
                hint = f"; they cannot be counted here: {problem}"
            keys = "data.source.clients and data.source.train_examples" if self.by_client else "data.source.train_examples"
            raise ConfigError(f"give {keys}, which are public and decide the noise{hint}")
        return replace(self.shapes(name), train_size=self.train_examples, users=self.clients or 0)

    def read(self, name: str) -> Dataset:
        """Read the data.

        Raises:
            ConfigError: the configuration lacks numbers or says others. DataError: as `of_table` and `of_arrays`.
        """
        info, dataset = self.info(name), self.examples(name)
        found = dataset.info
        if (found.train_size, found.users) != (info.train_size, info.users):
            said = f"clients = {self.clients}, train_examples = {self.train_examples}" if self.by_client else self.train_examples
            raise ConfigError(
                f"data.source says {said}, and {self.main} has {self._counts(dataset)}: these public numbers decide the noise; "
                f"correct them, or find out what changed"
            )
        return dataset

    def _counts(self, dataset: Dataset) -> str:
        clients = f"clients = {dataset.info.users}, " if self.by_client else ""
        return f"{clients}train_examples = {dataset.info.train_size}"


class TableSource(DataSource, TableCard):
    """A CSV, TSV or Parquet file. file: its path. test_file: another of the same columns, for testing."""

    file: str
    features: tuple[str, ...] = Field(min_length=1)
    test_file: str | None = None

    @property
    def main(self) -> Path:
        """The file."""
        return Path(self.file)

    @property
    def by_client(self) -> bool:
        """Return whether a column gives the client."""
        return self.client is not None

    def shapes(self, name: str) -> Info:
        """Return the shapes, from columns and classes."""
        classes = self.classes if isinstance(self.classes, int) else len(self.classes or ())
        shape = () if isinstance(self.target, str) else (len(self.target),)
        quantities = Targets(shape, "float32", self.targets, self.unit)
        target = Targets(shape, "int64", self.class_names) if classes else quantities
        card = self.model_copy(update={"name": name})
        return table_info(card, self.features, Labelled(np.empty(0), target, classes))

    def examples(self, name: str) -> Dataset:
        """Read the file in the format of its suffix."""
        latest = self.test.latest if self.test is not None else None
        columns = [*self.features, *self.targets]
        extra = [column for column in (self.client, latest) if column is not None]
        texts = [*self.categories, *([] if self.client is None else [self.client])]
        table = read_table(self.main, list(dict.fromkeys([*columns, *extra])), texts)
        own_test = None if self.test_file is None else read_table(Path(self.test_file), list(dict.fromkeys(columns)), texts)
        return of_table(table, self.model_copy(update={"name": name}), own_test, f"a table in a file {self.main.suffix}")

    def rows(self) -> Iterator[tuple[Array, Array] | str]:
        """Yield (input, target) for each row, or an error message; the client column is not read.

        Raises:
            DataError: the file cannot be read, or lacks a column.
        """
        columns, alone = dict.fromkeys([*self.features, *self.targets]), self.model_copy(update={"client": None})
        for row in read_rows(self.main, list(columns), [*self.categories]):
            try:
                examples, _ = examples_of(row, alone, self.features)
                yield examples.x[0], examples.labelled.y[0]
            except Exception as problem:
                yield str(problem)


class ImageSource(DataSource):
    """A folder of pictures. images: its path. shape: (channels, height, width) of each. classes: their names, in order.

    labels: what the folders below are named after, from the top: class, client, or both. table: a CSV with the columns file and
    `labels` instead. test_images: a folder of the same kind, for testing. mean, std: as for arrays.
    """

    images: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...] = Field(min_length=2)
    labels: tuple[Literal["class", "client"], ...] = ("class",)
    table: str | None = None
    test_images: str | None = None
    mean: float | tuple[float, ...] = 0.5
    std: float | tuple[float, ...] = 0.5

    @field_validator("shape")
    @classmethod
    def _channels_first(cls, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        if shape[2] in (1, 3) and shape[0] not in (1, 3):
            raise ConfigError(
                f"data.source.shape = {list(shape)}: give (channels, height, width), as {[shape[2], *shape[:2]]} is"
            )
        return shape

    @field_validator("labels")
    @classmethod
    def _classes(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        if "class" not in labels or len(set(labels)) < len(labels):
            raise ConfigError(f"data.source.labels = {list(labels)}: give 'class', and 'client' where pictures have one")
        return labels

    @property
    def main(self) -> Path:
        """The folder."""
        return Path(self.images)

    @property
    def by_client(self) -> bool:
        """Return whether folders or a table give the client."""
        return "client" in self.labels

    def shapes(self, name: str) -> Info:
        """Return the shapes, from shape and classes."""
        target = Targets((), "int64", self.classes)
        return array_info(self._card(name), self.shape, Labelled(np.empty(0), target, len(self.classes)))

    def examples(self, name: str) -> Dataset:
        """Read with Pillow."""
        root = self.main
        found = (
            by_folders(root, self.labels, self.shape)
            if self.table is None
            else by_table(root, Path(self.table), self.labels, self.shape)
        )
        test: Any = self.test
        if self.test_images is not None:
            test = by_folders(Path(self.test_images), self.labels, self.shape)[:2]
        public = self._card(name).model_dump(exclude_unset=True)
        return of_arrays((found.x, found.labels), found.clients, test, public, "a folder of pictures")

    def _card(self, name: str) -> ArrayCard:
        facts = {"classes": self.classes, "mean": self.mean, "std": self.std, "split_seed": self.split_seed}
        return checked_card(ArrayCard, name=name, **facts)


def source_of(section: Any) -> DataSource | None:
    """Return the source that the section describes: a table for `file`, or pictures for `images`.

    Raises:
        ConfigError: neither, both, or an unknown or impossible key.
    """
    if section is None or isinstance(section, DataSource):
        return section
    if not isinstance(section, Mapping) or ("file" in section) == ("images" in section):
        raise ConfigError(
            f"data.source = {section!r}: give `file`, the path of a CSV or Parquet table, or `images`, that of a folder of "
            f"pictures"
        )
    if "name" in section:
        raise ConfigError(f"data.source.name = {section['name']!r}: the name of the data is data.name")
    kind = TableSource if "file" in section else ImageSource
    try:
        return kind(**section)
    except ValidationError as error:
        raise refusal(error, kind, "data.source.") from None
