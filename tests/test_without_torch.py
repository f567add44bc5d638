"""fedveil without its extra `train`: what works, and the line of everything else; torch is blocked in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fedveil.errors import TRAINING

CONFIG = """
[data]
name = "digits"
partition = { kind = "iid", clients = 20 }
[model]
name = "mlp"
[method]
name = "dp-fedavg"
clip = 1.0
[training]
rounds = 2
[privacy]
epsilon = 8
delta = 1e-3
view = "server"
"""
BLOCKED = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(TRAINING)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def without_torch(program: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that cannot import what the extra `train` installs."""
    code = BLOCKED + textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, check=False)


def command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return without_torch("from fedveil.cli.app import main\nmain()", *words, folder=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("without")
    (folder / "small.toml").write_text(CONFIG)
    program = """
        import numpy as np
        import fedveil as fv
        release = fv.Releaser(clip=1.0, epsilon=8, delta=1e-5, rounds=3, clients=12, ledger="site.ledger")
        noisy = release({"weight": np.ones((3, 4))})
        mean = fv.NoisyMean(clip=1.0, epsilon=8, delta=1e-5, rounds=3, clients=2, ledger="sum.ledger", place="sum")
        mean([noisy, noisy])
        print(release.statement)
    """
    done = without_torch(program, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "server view" in done.stdout
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("certify", "small.toml"),
        ("plan", "small.toml"),
        ("ledger", "site.ledger"),
        ("verify", "site.ledger"),
        ("verify", "sum.ledger"),
        ("budget", "show", "site.ledger"),
        ("budget", "create", "lifetime", "--epsilon", "3", "--delta", "1e-5"),
        ("explore", "--out", "explorer.html"),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_these_commands_need_no_torch(folder: Path, words: tuple[str, ...]) -> None:
    done = command(*words, folder=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words", [("run", "small.toml"), ("demo",), ("attack", "small.toml", "--kind", "ig"), ("data",)], ids=" ".join
)
def test_the_others_name_the_extra_in_one_line(folder: Path, words: tuple[str, ...]) -> None:
    done = command(*words, folder=folder)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("fedveil: this needs ")
    assert "pip install 'fedveil[train]'" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--track nope", "--track nope: unknown tracker"),
        ("--set data.name=nope", "data.name = 'nope': unknown data set"),
        ("--set method.name=nope", "method.name = 'nope': unknown method"),
        ("--set data.partition.kind=nope", "data.partition.kind = 'nope': unknown partition"),
        ("--set data.partition.clients=0", "partition iid: clients = 0 is not possible"),
    ],
    ids=lambda text: text.split("=")[0],
)
def test_unknown_names_are_refused_before_torch_and_scipy_are_loaded(folder: Path, words: str, message: str) -> None:
    program = """
        from fedveil.cli.app import main
        try:
            main()
        finally:
            print(sorted({"torch", "scipy.special", "rich", "matplotlib"} & sys.modules.keys()))
    """
    done = without_torch(program, "run", "small.toml", *words.split(), folder=folder)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"fedveil: {message}")
    assert done.stdout.strip() == "[]"


def test_a_name_of_the_package_names_the_extra(folder: Path) -> None:
    done = without_torch("import fedveil as fv\nfv.train", folder=folder)
    assert done.stderr.splitlines()[-1].endswith("pip install 'fedveil[train]'")


def test_a_releaser_is_imported_quickly(folder: Path) -> None:
    program = "import time\nbegin = time.process_time()\nimport fedveil as fv\nfv.Releaser\nprint(time.process_time() - begin)"
    assert min(float(without_torch(program, folder=folder).stdout) for _ in range(3)) < 0.5
