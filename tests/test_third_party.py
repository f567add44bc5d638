"""A package of somebody else's that registers by entry points: named in a configuration, recorded, and trusted or not."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

METHOD = '''
from typing import Literal
from pydantic import Field
import fedveil as fv
from fedveil.methods.base import Fixed, MethodConfig, gaussian_plan

@fv.register
class Theirs(MethodConfig):
    """A method of somebody else's."""
    name: Literal["theirs"] = "theirs"
    clip: float = Field(0.5, gt=0)

    def release(self, s):
        return Fixed(gaussian_plan(s, self.clip))
'''
REST = '''
import torch
import fedveil as fv

@fv.register("their-net")
def net(input_shape, outputs):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, outputs))

def hello():
    """Greet."""
    print("hello from them")

class Told:
    name = "told"
    def begin(self, begun): print("told: begin")
    def round(self, record): ...
    def end(self, status): print("told:", status)
'''
POINTS = {
    "method.theirs": "their_methods.method:Theirs",
    "model.their-net": "their_methods.rest:net",
    "command.hello": "their_methods.rest:hello",
    "tracker.told": "their_methods.rest:Told",
    "files.theirs": "their_methods",
}
CONFIG = """
[method]
name = "theirs"
[model]
name = "linear"
[training]
rounds = 1
clients_per_round = 2
[data]
name = "digits"
partition = {kind = "iid", clients = 4}
[privacy]
epsilon = 8.0
delta = 1e-4
[run]
engine = "inline"
"""


def install(folder: Path, distribution: str, points: dict[str, str], version: str = "1.2") -> None:
    """Lay a distribution's description where an installer would."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[fedveil]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    package = tmp_path / "site" / "their_methods"
    (package / "presets" / "theirs").mkdir(parents=True)
    (package / "presets" / "theirs" / "digits.toml").write_text(f"# A preset of theirs.\n{CONFIG}")
    (package / "__init__.py").write_text("")
    (package / "method.py").write_text(METHOD)
    (package / "rest.py").write_text(REST)
    install(tmp_path / "site", "their-methods", POINTS)
    return tmp_path / "site"


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the packages of a folder."""
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment)


def answer(site: Path, program: str) -> Any:
    """Return the last line that a program prints, from JSON."""
    ran = python(site, "-c", f"import json, sys\n{program}")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_the_commands_know_an_installed_package(site: Path) -> None:
    listed = python(site, "-m", "fedveil", "methods")
    assert "theirs" in listed.stdout, listed.stderr
    assert "A method of somebody else's." in listed.stdout
    assert "theirs/digits  A preset of theirs" in python(site, "-m", "fedveil", "methods", "theirs").stdout
    assert python(site, "-m", "fedveil", "hello").stdout == "hello from them\n"
    assert "Greet." in python(site, "-m", "fedveil", "--help").stdout


@pytest.mark.heavy
def test_a_run_needs_no_plugins_and_records_distribution_version_and_digest(site: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--track", "told", "--set", "model.name=their-net", "--out", str(run))
    ran = python(site, "-m", "fedveil", "run", "--preset", "theirs/digits", *options)
    assert ran.returncode == 0, ran.stderr
    assert "told: FINISHED" in ran.stdout
    versions = json.loads((run / "versions.json").read_text())
    digest = hashlib.sha256((site / "their_methods" / "method.py").read_bytes()).hexdigest()
    assert versions["plugin their_methods.method"] == f"sha256 {digest}"
    assert "plugin their_methods.rest" in versions
    assert versions["distribution their-methods"] == "1.2"
    assert python(site, "-m", "fedveil", "certify", str(run)).returncode == 0
    unknown = python(tmp_path, "-m", "fedveil", "certify", str(run / "config.toml"))
    assert "model.name = 'their-net': unknown model" in unknown.stderr


def test_reading_a_configuration_imports_nothing_of_theirs(site: Path, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    program = f"from fedveil.experiment.config_files import load_config\nc = load_config({str(tmp_path / 'c.toml')!r})\n"
    assert answer(site, f"{program}print(json.dumps([*c.code, 'their_methods' in sys.modules]))") == [
        "their_methods.method",
        False,
    ]


def test_a_client_runs_their_code_only_where_it_trusts_the_distribution(site: Path, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    program = f"""
from fedveil.deploy.consent import Consent, ConsentRefused, check_offer
from fedveil.experiment.config_files import load_config
def asked(trust, *overrides):
    consent = dict(data=dict(part=0), lifetime=dict(aggregate=dict(epsilon=10, delta=1e-3)), trust=trust)
    try:
        return check_offer(Consent.model_validate(consent), load_config({str(tmp_path / "c.toml")!r}, overrides)).method.name
    except ConsentRefused as refused:
        return str(refused)
found = [asked([]), asked(["others"]), "their_methods" in sys.modules]
found += [asked(["their-methods"], 'run.plugins=["their_methods.rest", "theirs"]'), "their_methods" in sys.modules]
print(json.dumps([*found, asked(["their-methods"])]))
"""
    alone, others, before, plugins, after, trusted = answer(site, program)
    assert (
        alone
        == others
        == ("the run needs code of its own (their_methods.method, theirs), and this client does not run code named by a server")
    )
    assert "code of its own (their_methods.rest, theirs)" in plugins or "code of its own (theirs)" in plugins
    assert not before
    assert not after
    assert trusted == "theirs"


def test_a_name_of_two_distributions_is_refused_with_both_and_the_others_work(site: Path) -> None:
    install(site, "more-methods", {"method.theirs": "elsewhere:Theirs", "method.dp-fedavg": "elsewhere:Wrong"}, "0.1")
    program = """
import fedveil as fv
from fedveil.methods.method_registry import METHODS
try:
    METHODS.find("theirs")
except fv.ConfigError as refused:
    print(json.dumps([str(refused), METHODS["dp-fedavg"].__module__]))
"""
    refused, module = answer(site, program)
    assert "method.name = 'theirs' is registered by" in refused
    assert "their-methods 1.2" in refused
    assert "more-methods 0.1" in refused
    assert module == "fedveil.methods.fedavg"
    assert "'dp-fedavg' is fedveil's own: the method of that name of more-methods 0.1 is not used" in (
        python(site, "-c", "from fedveil.methods.method_registry import METHODS; list(METHODS)").stderr
    )


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ({"method.gone": "nowhere:Gone"}, "nowhere:Gone of more-methods 1.2 cannot be imported: ModuleNotFoundError"),
        ({"method.path": "pathlib:Path"}, "does not register that method: decorate it with fedveil.register"),
    ],
)
def test_what_cannot_be_registered_is_refused_with_its_owner(site: Path, points: dict[str, str], message: str) -> None:
    install(site, "more-methods", points)
    program = """
import fedveil as fv
from fedveil.methods.method_registry import METHODS
try:
    METHODS.find(NAME)
except fv.ConfigError as refused:
    print(json.dumps(str(refused)))
"""
    name = next(iter(points)).partition(".")[2]
    assert message in answer(site, f"NAME = {name!r}\n{program}")


def test_one_broken_package_is_named_and_the_others_are_listed(site: Path) -> None:
    points = {"mehtod.x": "a:b", "method.gone": "nowhere:Gone", "task.gone": "nowhere:Gone", "command.gone": "nowhere:gone"}
    install(site, "more-methods", points)
    listed = python(site, "-m", "fedveil", "methods")
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith("gone")]
    assert "cannot be used: method.name = 'gone': nowhere:Gone of more-methods 1.2 cannot be imported" in line
    assert "A method of somebody else's." in listed.stdout
    assert "entry point 'mehtod.x' of more-methods 1.2 is not used: its name must be KIND.NAME" in listed.stderr
    assert listed.stdout.startswith("fedavg ")
    helped = python(site, "-m", "fedveil", "--help")
    assert "hello" in helped.stdout
    assert "Cannot be used" in helped.stdout
    called = python(site, "-m", "fedveil", "gone")
    assert called.returncode == 2
    assert "nowhere:gone of more-methods 1.2 cannot be imported" in called.stderr


@pytest.mark.heavy
def test_a_command_tells_that_an_installed_package_has_changed_since_the_run(site: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert python(site, "-m", "fedveil", "run", "--preset", "theirs/digits", "--out", str(run)).returncode == 0
    assert "was made with" not in python(site, "-m", "fedveil", "certify", str(run / "config.toml")).stderr
    method = site / "their_methods" / "method.py"
    method.write_text(method.read_text().replace("0.5", "0.25"))
    told = python(site, "-m", "fedveil", "certify", str(run / "config.toml"))
    assert told.returncode == 0
    assert f"{run} was made with their-methods 1.2, whose their_methods.method had other code" in told.stderr
    assert told.stderr.count("was made with") == 1


def test_fedveil_works_without_the_papers_and_the_deployment(tmp_path: Path) -> None:
    program = """
sys.modules["fedveil.papers"] = sys.modules["fedveil.deploy"] = None
import fedveil as fv
from fedveil.experiment.config import parse
from fedveil.experiment.presets import names
from fedveil.methods.method_registry import METHODS
statement = fv.certify(parse({"method": {"name": "dp-fedavg"}, "privacy": {"epsilon": 8.0}}))
print(json.dumps([len(METHODS), names(), statement.proven.epsilon <= 8]))
"""
    assert answer(tmp_path, program) == [9, [], True]


def test_certifying_a_general_method_loads_no_paper(tmp_path: Path) -> None:
    program = """
import fedveil as fv
from fedveil.experiment.config import parse
fv.certify(parse({"method": {"name": "dp-fedavg"}, "privacy": {"epsilon": 8.0}}))
deep = [m for m in sys.modules if m.startswith(("fedveil.papers.", "fedveil.deploy."))]
print(json.dumps([m for m in deep if not (m.startswith("fedveil.papers.") and m.count(".") == 2)]))
"""
    assert answer(tmp_path, program) == []


@pytest.mark.heavy
def test_the_package_of_the_page_attacks_reads_data_and_draws_a_chart(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
    files = dict(re.findall(r"^```\w+\n# ([\w./]+)\n(.*?)^```$", page, flags=re.S | re.M))
    site = tmp_path / "site"
    install(site, "my-fed", tomllib.loads(files.pop("pyproject.toml"))["project"]["entry-points"]["fedveil"], "0.1")
    (site / "my_fed").mkdir()
    (site / "my_fed" / "__init__.py").touch()
    for name, text in files.items():
        (site / name).write_text(text)
    (tmp_path / "c.toml").write_text(
        '[data]\nname = "blobs"\npartition = { kind = "users" }\n[model]\nname = "linear"\n[method]\nname = "measured"\n'
        '[training]\nrounds = 3\nclients_per_round = 20\n[privacy]\nepsilon = 8.0\ndelta = 1e-3\nview = "server"\n'
    )
    found = answer(
        site,
        f"""
import fedveil as fv
run = fv.Federation.from_toml({str(tmp_path / "c.toml")!r}).fit(out={str(tmp_path / "run")!r}, seed=1)
attack = run.attack("sign", images=20)
page = run.report()
print(json.dumps([run.history[-1]["released_norm"], "Norm of the release" in open(page).read(), run.verify().outcome]))
""",
    )
    assert found[0] > 0
    assert found[1:] == [True, "verified"]
    assert "labels_right" in (tmp_path / "run" / "attack-sign.json").read_text()
