"""The commands and files of docs/deployment.md, typed as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from fedveil.deploy.consent import Consent
from fedveil.deploy.programs import free_port
from fedveil.experiment.config import Config
from fedveil.experiment.resolve import resolve

pytestmark = pytest.mark.filterwarnings("default")
pytest.importorskip("flwr", reason="needs flwr (pip install 'fedveil[flower]')")

PAGE = (Path(__file__).parents[2] / "docs/deployment.md").read_text()
NAMES = ("alice", "bob")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(title: str, kind: str = "") -> list[str]:
    """All blocks of that kind in a section, in their order."""
    found: list[str] = re.findall(rf"^```{kind}\n(.*?)^```$", section(title), re.DOTALL | re.MULTILINE)
    return found


def commands(title: str) -> list[str]:
    """All commands of a section, in their order, without remarks."""
    return [line.split("  #")[0].strip() for block in blocks(title) for line in block.splitlines()]


def table(path: Path, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    age, pressure = rng.integers(20, 90, rows), rng.normal(130, 20, rows).round(1)
    sick = (age + pressure + rng.normal(0, 10, rows) > 190).astype(int)
    lines = [f"{a},{p},{s}" for a, p, s in zip(age, pressure, sick, strict=True)]
    path.write_text("\n".join(["age,pressure,outcome", *lines]) + "\n")


class Machines:
    """A folder for each of the three, and what was typed there."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        for name in ("server", *NAMES):
            (folder / name).mkdir()

    def words(self, command: str) -> list[str]:
        here = command.replace("fl.example.org", "127.0.0.1").replace("9700", str(self.port))
        program, *words = shlex.split(here)
        assert program == "fedveil"
        return [sys.executable, "-u", "-m", "fedveil", *words]

    def typed(self, where: str, command: str) -> str:
        done = subprocess.run(
            self.words(command), cwd=self.folder / where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}"
        return done.stdout

    @contextmanager
    def background(self, where: str, command: str) -> Iterator[subprocess.Popen[bytes]]:
        with (self.folder / where / "output").open("ab") as log:
            child = subprocess.Popen(
                self.words(command), cwd=self.folder / where, stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ)
            )
        try:
            yield child
        finally:
            child.terminate()
            child.wait(60)


def test_three_sites_with_secure_aggregation_are_what_the_page_writes_down() -> None:
    """The consent had the keys of secure aggregation under [data], and the run was one for five sites."""
    (offered,), (consent,) = blocks("The configuration", "toml"), blocks("Consent", "toml")
    tables, pinned = blocks("Secure aggregation", "toml")
    own = tomllib.loads(consent)
    agreed = Consent.model_validate({**own, **tomllib.loads(pinned)})
    whole = {**tomllib.loads(offered), **tomllib.loads(tables)}
    whole["data"]["source"]["clients"] = 3
    setting = resolve(Config.model_validate(whole)).setting
    assert (setting.clients, setting.least_set, setting.secure_aggregation) == (3, agreed.least_set, "on")
    assert (agreed.least_colluders, agreed.secure_aggregation) == (setting.known_shares, "required")
    assert Consent.model_validate(own).secure_aggregation == "allowed"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_machines_as_the_page_says_end_in_a_verified_run(tmp_path: Path) -> None:
    """From three CSV files to `fedveil verify run --against`, each command exit 0."""
    there = Machines(tmp_path, free_port())
    (tmp_path / "server/c.toml").write_text(blocks("The configuration", "toml")[0])
    table(tmp_path / "server/public-test.csv", 200, 0)
    for number, name in enumerate(NAMES, 1):
        table(tmp_path / f"{name}/{name}.csv", 2000, number)
        (tmp_path / name / "consent.toml").write_text(blocks("Consent", "toml")[0].replace("alice", name))
    todo = commands("Three machines")
    init, key, *admit, serve, check, join = todo
    there.typed("server", init)
    for name in NAMES:
        there.typed(name, key.replace("alice", name))
        shutil.copy(tmp_path / "server/network/ca.pem", tmp_path / name)
        shutil.copy(tmp_path / name / f"{name}.pub", tmp_path / "server")
    for command in admit:
        there.typed("server", command)
    with ExitStack() as stack:
        server = stack.enter_context(there.background("server", serve))
        for name in NAMES:
            assert "Privacy statement" in there.typed(name, check.replace("alice", name))
        for name in NAMES:
            stack.enter_context(there.background(name, join.replace("alice", name)))
        assert server.wait(600) == 0, (tmp_path / "server/output").read_text()
    (verify,) = commands("Two ledgers")
    for name in NAMES:
        shutil.copytree(tmp_path / name / f"{name}-state", tmp_path / f"server/{name}-state")
        assert "contradicted" not in there.typed("server", verify.replace("alice", name))
