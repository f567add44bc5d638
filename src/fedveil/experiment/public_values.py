"""Values that a configuration assumes to be public without a check, as assumptions of its statement."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fedveil.accounting.types import Unit
from fedveil.data.features import NETWORKS, SHAPES
from fedveil.experiment.model_section import HANDED_OVER
from fedveil.experiment.public_setting import FLOWER_APP, NVFLARE_JOB, UNSEEN, method_of, task_of
from fedveil.methods.method import is_user_defined
from fedveil.statement.statement import Assumption

TOGETHER = ("batched", "cuda")
"""Engines that train several clients in one pass."""

if TYPE_CHECKING:
    from fedveil.data.catalogue import Info
    from fedveil.experiment.config import Config


def public_values(config: Config, data: Info) -> tuple[Assumption, ...]:
    """Return assumptions for values that are sent or used as they are, although they do not follow from the configuration."""
    network, assumptions = config.model, []
    why = "they are known to everybody as they are: no clip or noise is applied to them"
    if network.parts.weights is not None:
        digest = network.recorded.weights if network.recorded is not None else ""
        file = f"the values in model.weights{f' (SHA-256 {digest})' if digest else ''}"
        assumptions.append(Assumption(f"{file} are public and were not trained on the clients' data", why))
    if not network.built_in:
        initial = network.recorded.initial if network.recorded is not None else ""
        whose = "handed over" if network.name == HANDED_OVER else f"made by {network.name.rpartition('/')[2]}"
        assumptions.append(
            Assumption(
                f"the initial and frozen parameters of the model {whose} are public and were not trained on the clients' data"
                f"{f' (SHA-256 of the initial ones: {initial})' if initial else ''}",
                why,
            )
        )
    custom = is_user_defined(method_of(config)) or task_of(config).is_user_defined
    user_defined = custom or not network.built_in or data.features_of or config.data.code
    if user_defined and config.data.name not in UNSEEN:
        assumptions.append(_own_code(config, data=bool(data.features_of or config.data.code)))
    if data.counted:
        assumptions.append(
            Assumption(
                f"the {' and the '.join(data.counted)} ({data.classes}) is public, though it was counted in the data",
                "nothing was charged for the count, and a class that one client alone has shows in it; classes= says it instead",
            )
        )
    kind = config.data.partition.get("kind", "iid")
    if data.users and kind != "users" and config.privacy.unit is Unit.CLIENT:
        assumptions.append(_people(data.users, kind))
    if data.features_of:
        assumptions.append(_network(data.features_of))
    assumptions += _PROGRAMS.get(config.data.name, ())
    if config.run.engine in TOGETHER and config.training.local != "dp-sgd":
        assumptions.append(_APART)
    return (*assumptions, *_features(config))


def beside_the_releases(config: Config) -> tuple[str, ...]:
    """Return warnings about information that clients send in addition to releases, and that no epsilon covers."""
    if config.data.name == FLOWER_APP and config.data.partition.get("evaluate"):
        return (
            "clients evaluate, and what they answer (metrics) leaves without clip or noise: no epsilon of this statement covers "
            "it",
        )
    return (_NVFLARE_BESIDE,) if config.data.name == NVFLARE_JOB else ()


_FLOWER = (
    Assumption(
        "the code of the Flower app carries nothing from one client to another: fedveil neither runs nor isolates it",
        "what it kept would pass by clip and noise, into other updates or what the app publishes",
    ),
    Assumption(
        "the Flower app asks its clients nothing outside its strategy: no query, evaluation or training of its own by the grid",
        "what they answer there leaves without clip or noise, and fedveil sees neither question nor answer",
    ),
    Assumption(
        "whether a reply has the arrays of the model (names, shapes, types) follows from the Flower app, whosever it is",
        "a run in which no reply has had them ends, which everybody sees",
    ),
)
_NVFLARE = (
    Assumption(
        "the training of each site depends on its own data and the models that it was sent: fedveil neither runs nor isolates it",
        "what it kept of another site would pass by clip and noise",
    ),
)
_NVFLARE_BESIDE = (
    "sites of NVFlare also send metrics and numbers of examples: the server's model selection, metrics files, statistics and "
    "logs read them without clip or noise, and no epsilon of this statement covers what these publish"
)
_PROGRAMS = {FLOWER_APP: _FLOWER, NVFLARE_JOB: _NVFLARE}
"""Assumptions about programs that fedveil does not run, by the name of their data."""


def _own_code(config: Config, *, data: bool) -> Assumption:
    """Return the one assumption about all user-defined code, whichever parts it provides.

    Args:
        data: whether it also reads, transforms or describes examples.
    """
    default = "process" if sys.platform.startswith("linux") and config.run.engine not in TOGETHER else "copy"
    isolation, records = config.run.isolation or default, config.training.local == "dp-sgd"
    where = {
        "process": "model, task and method see the data of a client in a process that is forked for that client and ends with it "
        "(layers of torch alone, which keep nothing, in that of the run), so only files, other processes and a GPU are left",
        "copy": "each client trains a fresh copy of model, task and method, so only what lies outside of these objects is left, "
        "such as globals, classes, closures, caches of functions, files and other processes",
    }["copy" if isolation == "copy" else "process"]
    reads = "; what reads, transforms or describes examples takes each by itself" if data else ""
    within = {
        "vmap": "; it is called on single records, many of a client in one pass of torch.func.vmap, and each pass has a copy of "
        "the module, so only what it keeps outside of the module could reach the records of another pass",
        "loop": "; it is called on single records, one after the other, and each has a copy of the module, so only what it keeps "
        "outside of the module could reach the next record",
        "pass": "; it is called on single records, and each pass, of one record in a loop or of several under torch.func.vmap, "
        "has a process of its own besides, so nothing that it keeps reaches the records of another pass",
    }["pass" if isolation == "pass" else config.training.per_example]
    between = "from one record or client to another" if records else "from one client to another"
    return Assumption(
        f"user-defined code carries nothing {between}: {where}{reads}{within if records else ''}",
        "what it kept would pass by clip and noise, into other updates, a plan or a score",
    )


_APART = Assumption(
    "clients that train in one pass (run.engine = 'batched', or 'cuda', which 'auto' is with a GPU) do not move the rounding of "
    "each other's updates",
    "they can, by 2e-8 of their gradients where it was measured, and the proof of the clip counts one client's own update only: "
    "inline, pool and stacked train each client by itself",
)


def _people(users: int, kind: str) -> Assumption:
    """Return the assumption about who a client is, if the data name owners and the clients are made otherwise."""
    return Assumption(
        f"whom the guarantee protects is a client that data.partition.kind = '{kind}' made, and none of the {users} clients whom "
        f"the data name",
        "who has records with several clients is protected as a group of as many, at a larger epsilon; data.partition.kind = "
        "'users' makes each of those whom the data name a client",
    )


def _network(name: str) -> Assumption:
    """Return the assumption that a network which made the features is public."""
    return Assumption(
        f"the network that made the features ({name}) is public and was not trained on the clients' data",
        "features are computed by it before training, at no cost",
    )


def _features(config: Config) -> list[Assumption]:
    """Return the assumptions about features that replace the examples, and about the data that fitted them."""
    if config.data.features is None:
        return []
    names = [name for name in config.public.data if name != SHAPES]
    drawn = (
        ", and whitened by pictures of shapes that a program draws, which are data of nobody"
        if SHAPES in config.public.data
        else ""
    )
    assumptions = [
        Assumption(
            f"the features (data.features = {config.data.features!r}) are made of each example by itself, by a public function "
            f"that was not fitted to the clients' data{drawn}",
            "they are made before training at no cost: what they told of other examples would pass by clip and noise",
        )
    ]
    if config.data.features in NETWORKS:
        assumptions.append(_network(NETWORKS[config.data.features]))
    if names:
        assumptions.append(
            Assumption(
                f"public.data = {', '.join(names)}: public, chosen and made without the clients' data; nobody in it is protected",
                f"the features are whitened by its mean and covariance ({config.public.components} components), at no cost",
            )
        )
    return assumptions
