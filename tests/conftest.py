"""Fixtures that every test may use."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is imported; threads of several processes wait for each other

import pytest
import torch
from hypothesis import settings

import fedveil.executors.select_engine
import fedveil.studies.worker_pool
from forked_workers import FORKING
from skips import refused

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so are programs started in the background; tests interrupt themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)

IN_MEMORY = Path("/dev/shm")
if IN_MEMORY.is_dir() and os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))  # ledgers wait for the disk at every charge

settings.register_profile("here", deadline=None, max_examples=50)  # a busy machine is no failure
# In CI the same examples in every run: red means the change.
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.hookimpl(tryfirst=True)  # before -m leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked `few(n)`, n run always, from the first to the last one; the others are slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for those in cases.values():
        mark = those[0].get_closest_marker("few")
        assert mark is not None
        n = mark.args[0]
        chosen = {i * (len(those) - 1) // max(n - 1, 1) for i in range(n)}
        for i, item in enumerate(those):
            if i not in chosen:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return refused((yield))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """One thread, so that results are equal to the bit."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def freed_memory_goes_back() -> Iterator[None]:
    """Return freed memory to the system after each file: forking takes as long as a process is large."""
    yield
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True, scope="session")
def one_core() -> Iterator[None]:
    """`run.engine = "auto"` is inline, as on one core: engines agree to the bit, and each pool starts workers that import torch.

    Tests of the pool name it; programs that tests start find the cores that there are.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedveil.executors.select_engine, "available_cores", lambda: 1)
        yield


@pytest.fixture(autouse=True, scope="session")
def forked_workers() -> Iterator[None]:
    """Workers of studies are forked from this process, not started as programs that import torch for seconds.

    `test_worker_pool` and a test of a grid whose worker dies start the programs.
    """
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(os, "fork"):
            patch.setattr(fedveil.studies.worker_pool, "subprocess", FORKING)
        yield


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The directory with real data sets, named by FEDVEIL_DATA; the test skips where it is absent."""
    named = os.environ.get("FEDVEIL_DATA", "")
    if not named or not Path(named).is_dir():
        pytest.skip("FEDVEIL_DATA names no directory with data sets")
    return Path(named)
