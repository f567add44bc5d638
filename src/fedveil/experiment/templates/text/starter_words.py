"""Sentences as data, and a network that predicts the next word of them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from fedveil.data.catalogue import IGNORED, Info, Targets
from fedveil.data.load import register
from fedveil.data.sources.raw import RawData

WORDS = (
    *("we", "they", "you", "met", "saw", "called", "missed", "the"),
    *("doctor", "nurse", "patient", "on", "before", "after", "monday", "tuesday", "friday"),
)
"""Public: chosen beforehand, from a dictionary, never from the texts that are to be protected."""

NUMBER = {word: number for number, word in enumerate(WORDS, 2)}
PADDING, UNKNOWN = 0, 1
LENGTH = 8
TEST_FROM = 300
"""People from this number on belong to no client: their sentences are the test set."""

INFO = Info(
    name="starter",
    title="sentences of 360 people; made up, replace them with yours",
    input_shape=(LENGTH,),
    classes=len(WORDS) + 2,
    train_size=2400,
    test_size=480,
    users=TEST_FROM,
    source="written by make_sentences.py",
    embedded=True,
    mean=(0.0,),
    std=(1.0,),
    target=Targets((LENGTH,), "int64"),
    vocabulary=len(WORDS) + 2,
)


@register(INFO)
def read(data_dir: Path | None) -> RawData:
    """starter.csv, from the configured `data.data_dir` or beside this file."""
    with ((data_dir or Path(__file__).parent) / "starter.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    people = np.array([int(row["person"]) for row in rows])
    tokens = np.array([numbers(row["sentence"]) for row in rows])
    x, y, test = tokens[:, :-1], tokens[:, 1:], people >= TEST_FROM
    y = np.where(y == PADDING, IGNORED, y)
    return RawData(x[~test], y[~test], x[test], y[test], users_train=people[~test])


def numbers(sentence: str) -> list[int]:
    """The numbers of its words: one more than LENGTH, since the target of each place is the next one."""
    found = [NUMBER.get(word, UNKNOWN) for word in sentence.lower().split()][: LENGTH + 1]
    return found + [PADDING] * (LENGTH + 1 - len(found))


class Net(nn.Module):
    """Scores [n, T, V] of the next word at each place, from the words before it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(INFO.vocabulary, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, INFO.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.memory(self.embedding(tokens))[0])
        return out
