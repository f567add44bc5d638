"""What the tests of methods share: small runs on the embedded digits, and runs whose releases are those of another run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedveil as fv
from by_hand import Book, in_memory
from fedveil.accounting.types import Gaussian, View
from fedveil.executors.inline import Inline
from fedveil.experiment.assembly import federation
from fedveil.experiment.config import Config, parse
from fedveil.experiment.presets import presets as preset_files
from fedveil.experiment.public_setting import configured_setting, local_spec, population_of
from fedveil.experiment.resolve import opened
from fedveil.federation.clients import Clients
from fedveil.federation.fit import fit
from fedveil.federation.progress import Federation, Progress, start
from fedveil.federation.round import ClientTask
from fedveil.federation.server import server_step
from fedveil.ledger.ledger import Ledger
from fedveil.mechanism.plan import Plan, Raw, Released, Upload
from fedveil.methods.method import Method
from fedveil.methods.run_cost import Planner, events_in_view
from fedveil.methods.setting import Setting
from fedveil.release.door import Door
from fedveil.release.sealed import AGGREGATE, Contribution, SealedUpload
from fedveil.training.local import BatchGradient, GradientSource, Local, LocalSpec
from fedveil.training.params import FlatModel, Layout


class Layers(nn.Module):
    """Parameters of given shapes, and no network."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, leaf = name.split(".")
            place: nn.Module = self
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            place.register_parameter(leaf, nn.Parameter(torch.zeros(shape)))


LAYERS: Mapping[str, tuple[int, ...]] = {"a": (3,), "b": (2, 2)}
_NOWHERE = np.zeros((2, 3), np.float32), np.array([0, 1])
TWO_CLASSES = fv.from_arrays(*_NOWHERE, classes=2, test=_NOWHERE)
PARTITION = {"clients": "clients", "records": "examples_per_client"}
TRAINING = {"cohort": "clients_per_round", "rounds": "rounds", "sampling": "sampling"}
"""Keys of a configuration, by the names that a setting has for them."""


def setting(
    view: View = View.SERVER,
    layers: Mapping[str, tuple[int, ...]] = LAYERS,
    *,
    training: Mapping[str, Any] | None = None,
    public_split: bool = False,
    **changes: Any,
) -> Setting:
    """The setting of a configuration: ten clients of 100 records, four a round, 20 rounds of one epoch in batches of 25.

    changes: of the setting's fields, or keys of the section privacy. With epsilon, noise_multiplier is what was calibrated.
    """
    changes = {"clients": 10, "records": 100, "cohort": 4, "rounds": 20, "sampling": "fixed", "delta": 1e-3, **changes}
    partition = {"kind": "iid"} | {key: changes.pop(name) for name, key in PARTITION.items()}
    rounds = {key: changes.pop(name) for name, key in TRAINING.items()}
    z = changes.pop("noise_multiplier", 2.0)
    calibrated = {"noise_multiplier": z} if changes.get("epsilon") is not None else {}
    config = fv.configure(
        model=Layers(layers),
        data={"partition": partition, "public_fraction": 0.1 if public_split else 0.0},
        training={"batch_size": 25, "optimizer": {"lr": 0.1}, **rounds, **(training or {})},
        privacy={"view": view, **({} if calibrated else {"noise_multiplier": z}), **changes},
    )
    return replace(configured_setting(config, population_of(config, TWO_CLASSES))[1], **calibrated)


LAYOUT = setting().layout


def layout(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """The layout of a model whose parameters have these names and shapes."""
    return setting(layers=shapes).layout


def local_of(
    network: nn.Module | FlatModel,
    source: GradientSource | None = None,
    *,
    training: Mapping[str, Any] | None = None,
    **more: Any,
) -> Local:
    """What a client works on in a round, from the network's parameters on, with the gradients of its loss or of `source`."""
    model = network if isinstance(network, FlatModel) else FlatModel(network)
    spec = spec_of(**(training or {}))
    start = more.pop("start", model.vector.clone())
    return Local(model, start, spec, source or BatchGradient(), torch.Generator().manual_seed(0), **more)


def released(model: list[float], round: int = 0, previous: list[float] | None = None) -> Released:
    """What a policy may see, from plain numbers."""
    return Released(round, torch.tensor(model), None if previous is None else torch.tensor(previous))


def upload(vector: list[float], start: list[float], noise_std: float = 0.0, layout: Layout = LAYOUT) -> Upload:
    """What left, from plain numbers."""
    std = torch.full((len(layout),), noise_std)
    return Upload(0, 0, torch.tensor(vector), std, Plan(clip=1.0, noise_std=noise_std), start=torch.tensor(start))


def planner(method: Any, s: Setting) -> Planner:
    """What makes the plans of a method in a setting, or of a release part by itself."""
    return Planner.of(method.release(s) if hasattr(method, "release") else method, s)


def spec_of(**training: Any) -> LocalSpec:
    """What a section `training` says of local training."""
    return local_spec(fv.configure(training=training))


def model_of(network: nn.Module) -> FlatModel:
    """A network as one vector of its parameters."""
    return local_of(network).model


def stepped(method: Any, uploads: Sequence[Upload], model: Tensor) -> Tensor:
    """The step [d] that the server of a method, or a server alone, makes of a round."""
    owner = method if hasattr(method, "server") else SimpleNamespace(name="server alone", server=lambda s: method)
    return server_step(owner, setting(), {}, uploads, model)[1]


def digits(method: dict[str, Any], *overrides: str, clients: int = 12, rounds: int = 3, **sections: Any) -> Config:
    """A seeded run of a linear model on the embedded digits, six clients a round; sections and overrides change the defaults."""
    training = {"clients_per_round": 6, "sampling": "fixed", "batch_size": 20, "optimizer": {"lr": 0.1}}
    raw = {
        "data": {"name": "digits", "partition": {"kind": "iid", "clients": clients}, **sections.get("data", {})},
        "model": {"name": "linear"},
        "method": method,
        "training": {"rounds": rounds, **training, **sections.get("training", {})},
        "privacy": {"delta": 1e-3, **sections.get("privacy", {})},
        "run": {"seed": 1, "seeded_noise": True},
    }
    return parse(raw, overrides)


def at_epsilon_8(method: dict[str, Any], *overrides: str, clients: int = 6, rounds: int = 4) -> Config:
    """`digits` with a budget, and all of its clients in each of four rounds."""
    training = {"clients_per_round": None, "batch_size": 32}
    return digits(method, *overrides, clients=clients, rounds=rounds, training=training, privacy={"epsilon": 8.0})


def job_of(config: Config, path: Path | None = None) -> Federation:
    """Everything of a run, with its ledger at `path`, or in memory and without a budget."""
    if path is None:
        return in_memory(config)
    Ledger.create(path, "r", {}).close()
    return federation(*opened(config), path, "r")


def first_task(job: Federation, client: int) -> ClientTask:
    """What a client is asked for in the first round."""
    return ClientTask(client, released(job.context.model.vector.tolist()), 1.0)


def with_door(job: Federation, door: Any = None, **changes: Any) -> Federation:
    """The run with another door, or with its door changed."""
    return replace(job, context=replace(job.context, door=door or replace(job.context.door, **changes)))


def book(job: Federation) -> Book:
    """The ledger in memory."""
    ledger = job.context.door.ledger
    assert isinstance(ledger, Book)
    return ledger


def trained(job: Federation, *, stacked: bool = False) -> Progress:
    """The run from start to end; every client must have succeeded.

    stacked: many small clients, trained in stacks where the method allows it, for what does not depend on the last bit.
    """
    progress = start(job)
    assert fit(job, Inline(job.context, stacked=stacked), progress) == ""
    assert not any(row["failures"] for row in progress.history), progress.history
    return progress


def update_of(method: str | Mapping[str, Any], network: nn.Module, x: Tensor, y: Tensor, **training: Any) -> Tensor:
    """The update [d] of the only client of a run of one round; the method adds no noise, or too little to be seen."""
    pair, classes = (x.numpy(), y.numpy()), max(2, int(y.max()) + 1)
    data = fv.from_arrays(*pair, client=np.zeros(len(y), int), classes=classes, test=pair)
    steps = {"rounds": 1, "batch_size": len(y), **training}
    federation = fv.Federation(model=network, method=method, training=steps, privacy={"view": "server"})
    before = nn.utils.parameters_to_vector(network.parameters()).detach().clone()
    with TemporaryDirectory() as folder:
        after = federation.fit(data, out=Path(folder, "run"), seed=0, engine="inline").model
    return nn.utils.parameters_to_vector(after.parameters()).detach() - before


class Sums(nn.Module):
    """A network that starts at zero; at label 0 a step of rate 1 on one example moves its tensors by the example's entries."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        score = x @ torch.cat([*self.parts]) - 1e6
        return torch.stack([score, torch.zeros_like(score)], 1)


def charged_mu(path: Path) -> dict[int, float]:
    """The mu that the ledger holds for each client number (-1: sums)."""
    total: dict[int, float] = {}
    with Ledger.open(path) as ledger:
        for _, _, entry in ledger.entries():
            assert isinstance(entry.event, Gaussian), entry
            total[entry.client] = total.get(entry.client, 0.0) + entry.event.count * entry.event.mu**2
    return {client: math.sqrt(square) for client, square in total.items()}


# --- the swap test -----------------------------------------------------------------------------------------------------


@dataclass
class Replay:
    """A door that writes down each plan, and hands over what another run's door handed over where it is given that door."""

    door: Door
    other: Replay | None = None
    plans: dict[tuple[int, int], Plan] = field(default_factory=dict)
    weights: dict[tuple[int, int], float] = field(default_factory=dict)
    norms: dict[tuple[int, int], float] = field(default_factory=dict)
    released: dict[tuple[int, int], Upload | SealedUpload] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.door, name)

    def seal_upload(self, *arguments: Any, **named: Any) -> SealedUpload:
        """As the door's, or the other run's upload."""
        key = self._write_down(self.door.seal_upload, arguments, named)
        sealed: SealedUpload = self._release(key, self.door.seal_upload, arguments, named)
        return sealed

    def seal(self, *arguments: Any, **named: Any) -> Contribution:
        """As the door's."""
        self._write_down(self.door.seal, arguments, named)
        return self.door.seal(*arguments, **named)

    def release_sum(self, contributions: Any, plan: Plan | Raw, round: int, denominator: float) -> Upload:
        """As the door's, or the other run's sum."""
        sent: Upload = self._release((AGGREGATE, round), self.door.release_sum, (contributions, plan, round, denominator), {})
        return sent

    def _release(self, key: tuple[int, int], real: Callable[..., Any], arguments: Any, named: Any) -> Any:
        if self.other is None:
            self.released[key] = real(*arguments, **named)
        return (self.other or self).released[key]

    def _write_down(self, real: Callable[..., Any], arguments: Any, named: Any) -> tuple[int, int]:
        bound = signature(real).bind(*arguments, **named)
        bound.apply_defaults()
        update, plan, key = (
            bound.arguments["update"],
            bound.arguments["plan"],
            (bound.arguments["client"], bound.arguments["round"]),
        )
        self.plans[key] = plan.make(update) if isinstance(plan, Raw) else plan
        self.weights[key], self.norms[key] = bound.arguments["weight"], float(update.norm())
        return key


def swapped_plans(config: Config) -> list[tuple[Plan, Plan]]:
    """The plans of two runs that release the same vectors although one client's data are all different in the second.

    Then the same with another number of examples, unless sizes are public: neither plans nor weights may follow it. The nominal
    number, |D| / N, is public and kept.
    """
    first = job_of(config)
    one, pairs = Replay(first.context.door), []
    trained(with_door(first, one))
    last = (0, config.training.rounds - 1)
    assert last in one.plans, "the swapped client must take part in the last round"
    for share in shares_swapped(first):
        second = job_of(config)
        clients = second.context.clients
        x = torch.randn(clients.examples(0)[0].shape, generator=torch.Generator().manual_seed(9)) * 5
        clients = with_first_client(clients, x, torch.full((len(x),), 3), share)
        two = Replay(second.context.door, one)
        trained(with_door(replace(second, context=replace(second.context, clients=clients)), two))
        assert one.plans.keys() == two.plans.keys()
        assert one.weights == two.weights, "the weight of a client shows how many examples it has"
        assert one.norms[last] != two.norms[last], "the swap must change what the client computes"
        pairs += [(one.plans[key], two.plans[key]) for key in one.plans]
    return pairs


def check_plans_read_only_uploads(config: Config) -> None:
    """The swap test: one client's whole data replaced, all releases kept, then every plan is the same.

    Other releases must give other plans, or this would test nothing.
    """
    pairs = swapped_plans(config)
    assert all_same(pairs)
    moved = job_of(config)
    other = Replay(replace(moved.context.door, randomness=replace(moved.draws, seed=config.run.seed + 1)))
    trained(with_door(moved, other))
    assert not all_same(list(zip((plan for plan, _ in pairs), other.plans.values(), strict=False)))


def shares_swapped(job: Federation) -> tuple[float, ...]:
    """How many examples the swapped client may have for its own: as many, or half of them as well.

    Sizes are public by declaration where the method's assumptions say so, and published variants weigh by them.
    """
    public = "each client's number of examples is public" in job.method.assumptions(job.setting)
    return (1.0,) if public or getattr(job.method, "variant", "proven") == "published" else (1.0, 0.5)


def with_first_client(clients: Clients, x: Tensor, y: Tensor, share: float) -> Clients:
    """The same clients, the first with the first `share` of these examples; the others keep theirs."""
    size, own = clients.size(0), math.ceil(share * len(y))
    offsets = clients.offsets.copy()
    offsets[1:] += own - size
    mine, others = (x[:own], y[:own]), (clients.x[size:], clients.y[size:])
    return replace(clients, x=torch.cat([mine[0], others[0]]), y=torch.cat([mine[1], others[1]]), offsets=offsets)


def all_same(pairs: list[tuple[Plan, Plan]]) -> bool:
    """Whether the plans say the same in each pair, tensors compared by value."""
    return all(_same(getattr(a, f.name), getattr(b, f.name)) for a, b in pairs for f in fields(Plan))


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        return x.keys() == y.keys() and all(_same(x[key], y[key]) for key in x)
    return x.equal(y) if hasattr(x, "equal") and hasattr(y, "equal") else bool(x == y)


def method_releases_mu(method: Method, s: Setting) -> float:
    """mu of everything that a run releases in its own view, all releases being Gaussian."""
    events = [e for e in events_in_view(method, s, s.scope.view) if isinstance(e, Gaussian)]
    return math.sqrt(sum(e.count * e.mu**2 for e in events))


def presets(folder: str) -> Sequence[Path]:
    """The shipped configurations of one method."""
    return [path for name, path in preset_files().items() if name.startswith(f"{folder}/")]
