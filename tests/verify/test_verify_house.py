"""The verifier is small, stands alone, and changes nothing of what it reads."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedveil
from fedveil.verify import verify_run
from verified_runs import made

PACKAGE = Path(fedveil.__file__).parent / "verify"
FILES = sorted(PACKAGE.glob("*.py"))


def test_it_is_small() -> None:
    assert sum(len(file.read_text().splitlines()) for file in FILES) <= 780


def test_it_imports_the_standard_library_numpy_scipy_special_and_itself() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                own = name.split(".")[0] in sys.stdlib_module_names or name.startswith("fedveil.verify")
                assert own or name in ("numpy", "numpy.typing", "scipy.special"), f"{file.name} imports {name}"


@pytest.mark.heavy
def test_no_torch_and_nothing_else_of_fedveil_is_loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = made(tmp_path_factory, "server")
    code = (
        "import sys; from fedveil.verify import verify_run; assert verify_run(sys.argv[1]).exit_status == 0; "
        "print(*sorted(m for m in sys.modules if m.split('.')[0] in ('fedveil', 'torch')))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert set(loaded) == {
        "fedveil",
        "fedveil.moved",
        "fedveil.verify",
        *(f"fedveil.verify.{f.stem}" for f in FILES if f.stem != "__init__"),
    }


@pytest.mark.heavy
@pytest.mark.parametrize("mode", [0o755, 0o555])
def test_it_changes_nothing_of_the_run(mode: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path / "run"
    shutil.copytree(made(tmp_path_factory, "poisson"), run)
    before = state(run)
    try:
        run.chmod(mode)
        assert verify_run(run).exit_status == 0
        assert state(run) == before
        shutil.copyfile(run / "ledger.sqlite", tmp_path / "log")
    finally:
        run.chmod(0o755)
    (run / "ledger.sqlite-wal").write_bytes((tmp_path / "log").read_bytes())
    before = state(run)
    assert verify_run(run).exit_status == 2
    assert state(run) == before


def state(run: Path) -> dict[str, tuple[int, bytes]]:
    """Time of the last change and content of each file; a folder counts as its names."""
    there = sorted(run.rglob("*"))
    return {str(f.relative_to(run)): (os.stat(f).st_mtime_ns, f.read_bytes() if f.is_file() else b"") for f in there}
