"""Build the wheel and the sdist, install them into empty environments, and use what was installed.

    python .ci/packages.py                 # the lowest and the newest dependencies: programs, types, pipx
    python .ci/packages.py --tests         # and the fast tests in each, against the installed wheel
    python .ci/packages.py --lowest-torch  # PyTorch at its lower bound, too: a download of 3 GB

PyTorch is otherwise the one of constraints.txt, in both environments.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 1_000_000
SHOULD_SHIP = ("py.typed", "__init__.pyi", "report/web/report.js", "report/web/theme.css", "papers/ladp_fl/")
FOLDERS = {"src", "tests", "docs", "examples", "benchmarks", "configs"}
CONFIG = """
data = { name = "digits", partition = { kind = "iid", clients = 10 } }
model = { name = "linear" }
method = { name = "dp-fedavg", clip = 0.5 }
training = { rounds = 3, clients_per_round = 5, sampling = "poisson" }
privacy = { epsilon = 6.0, delta = 1e-3 }
run = { seed = 4, seeded_noise = true }
"""
TYPED = """
import fedveil as fv
from fedveil.experiment.result import Result
from fedveil.statement.statement import Statement

config = fv.load_config("small.toml")
statement: Statement = fv.certify(config)
result: Result = fv.train(config)
method: fv.DPFedAvg = fv.DPFedAvg(clip=0.5)
wrong: int = fv.__version__
"""
MODULES = "not slow and not heavy and not browser"
TESTS = ("accounting", "papers", "ledger", "data", "tasks", "training", "release", "models", "methods", "federation", "statement")


def ran(*command: str | Path, cwd: Path) -> str:
    """What a program printed; this script ends with its text if it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    print("$", *(str(word) for word in command), flush=True)
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}\nexit status {done.returncode}")
    return done.stdout


def junk(names: dict[str, int]) -> list[str]:
    """What a reader of the sdist has no use for."""
    bad = re.compile(r"__pycache__|\.pyc$|node_modules|\.sqlite-shm$|^runs/|^build/|\.mypy_cache|\.DS_Store")
    return sorted(name for name, size in names.items() if bad.search(name) or size > LARGEST)


def built(work: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it; both looked through."""
    venv.create(work / "builder", with_pip=True)
    python = work / "builder" / "bin" / "python"
    ran(python, "-m", "pip", "install", "-q", "build", cwd=work)
    ran(python, "-m", "build", "--outdir", work / "dist", ROOT, cwd=work)
    (sdist,), (wheel,) = (list((work / "dist").glob(ending)) for ending in ("*.tar.gz", "*.whl"))
    with tarfile.open(sdist) as archive:
        held = {m.name.split("/", 1)[1]: m.size for m in archive.getmembers() if m.isfile()}
    if missing := FOLDERS - {name.split("/")[0] for name in held}:
        sys.exit(f"the sdist lacks {missing}")
    if bad := junk(held):
        sys.exit(f"the sdist holds {bad}")
    with zipfile.ZipFile(wheel) as archive:
        shipped = archive.namelist()
    if lacking := [name for name in SHOULD_SHIP if not any(path.startswith(f"fedveil/{name}") for path in shipped)]:
        sys.exit(f"the wheel lacks {lacking}")
    print(
        f"{sdist.name}: {len(held)} files, {sdist.stat().st_size:,} bytes; {wheel.name}: {len(shipped)}, {wheel.stat().st_size:,}"
    )
    return sdist, wheel


def lowest() -> Iterator[str]:
    """Each dependency at its lower bound, PyTorch aside."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for one in (*project["dependencies"], *project["optional-dependencies"]["train"]):
        name, bound = one.split(">=")
        if name != "torch":
            yield f"{name}=={bound}"


def torch(at_lowest: bool) -> str:
    pattern, text = (r'"torch>=(.*)"', "pyproject.toml") if at_lowest else (r"^torch==(.*)$", "constraints.txt")
    (found,) = re.findall(pattern, (ROOT / text).read_text(), re.M)
    return f"torch=={found}"


def used(python: Path, folder: Path) -> None:
    """A first hour with the installed program: demo, plan, run, verify, report, and its types."""
    fedveil = python.with_name("fedveil")
    (folder / "small.toml").write_text(CONFIG)
    (folder / "typed.py").write_text(TYPED)
    print(ran(fedveil, "--version", cwd=folder), end="")
    ran(fedveil, "demo", cwd=folder)
    ran(fedveil, "certify", "small.toml", cwd=folder)
    ran(fedveil, "plan", "small.toml", cwd=folder)
    ran(fedveil, "run", "small.toml", "--out", "small", cwd=folder)
    ran(fedveil, "verify", "small", cwd=folder)
    ran(fedveil, "report", "small", cwd=folder)
    ran(fedveil, "explore", "--out", "explore.html", cwd=folder)
    ran(python, "-m", "pip", "install", "-q", "mypy", cwd=folder)
    done = subprocess.run([python, "-m", "mypy", "--strict", "typed.py"], cwd=folder, capture_output=True, text=True, check=False)
    if done.stdout.count("error:") != 1 or 'expression has type "str", variable has type "int"' not in done.stdout:
        sys.exit(f"types: one error is expected, of the line that is wrong:\n{done.stdout}")


def tested(python: Path, folder: Path) -> None:
    """The fast tests of the checkout against the installed package."""
    ran(python, "-m", "pip", "install", "-q", "pytest", "pytest-timeout", "hypothesis", "jaxtyping", "pandas", cwd=folder)
    ran(python, "-m", "pip", "install", "-q", "dp-accounting>=0.5,<0.8", cwd=folder)
    old = ["-W", "ignore::DeprecationWarning"]  # old releases beside new Pythons and new dependencies of theirs
    paths = [f"tests/{room}" for room in TESTS]
    print(ran(python, "-m", "pytest", "-p", "no:cacheprovider", "-m", MODULES, *old, *paths, cwd=ROOT)[-300:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true")
    parser.add_argument("--lowest-torch", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        _, wheel = built(work)
        for name, bounds in (("lowest", list(lowest())), ("newest", [])):
            folder = work / name
            venv.create(folder, with_pip=True)
            python = folder / "bin" / "python"
            release = torch(options.lowest_torch and name == "lowest")
            ran(python, "-m", "pip", "install", "-q", release, f"{wheel}[train]", *bounds, cwd=folder)
            used(python, folder)
            if options.tests:
                tested(python, folder)
            print(f"{name}: works", flush=True)
        builder = work / "builder" / "bin" / "python"
        ran(builder, "-m", "pip", "install", "-q", "pipx", cwd=work)
        os.environ |= {"PIPX_HOME": str(work / "pipx"), "PIPX_DEFAULT_PYTHON": sys.executable}
        ran(
            builder,
            "-m",
            "pipx",
            "run",
            "--spec",
            f"{wheel}[train]",
            "--pip-args",
            f"-c {ROOT / 'constraints.txt'}",
            "fedveil",
            "demo",
            cwd=work,
        )
        print("pipx run: works")


if __name__ == "__main__":
    main()
