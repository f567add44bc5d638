"""Finished runs with secret noise for the tests of verification: made once, and copied to be changed."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest

from fedveil.experiment.config import parse
from fedveil.experiment.run import run
from report_runs import raw


def finished(factory: pytest.TempPathFactory, folder: Path, which: str = "run") -> Path:
    """A new copy, under `folder`, of one of several finished runs of one configuration."""
    return Path(shutil.copytree(_made(factory.getbasetemp(), which), folder / which))


@functools.cache
def _made(folder: Path, which: str) -> Path:
    config = raw()
    config["run"]["seeded_noise"] = False
    return run(parse(config), folder / f"finished-{which}").path
