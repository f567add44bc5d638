"""The data card of a run (`data.json`), which describes its data, whether configured or passed in by a program.

It is written before training. Everything in it except the digests is treated as public. The digests are keyed with a salt that
stays in the folder `private`: so they cannot be used to test membership, and show later whether the same data are passed in
again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.data.catalogue import Info, Targets
from fedveil.errors import ConfigError
from fedveil.experiment.config_files import load_recorded, with_model
from fedveil.experiment.model_section import HANDED_OVER
from fedveil.experiment.public_setting import by_own_clients, require_handed_over
from fedveil.experiment.resolve import opened
from fedveil.experiment.run_directory import PRIVATE, SALT, plain, private_folder, write_bytes, write_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedveil.data.dataset import Dataset
    from fedveil.data.partition import Partition
    from fedveil.experiment.assembly import Prepared
    from fedveil.experiment.config import Config
    from fedveil.experiment.experiment import DataSpec, Experiment

CARD = "data.json"
FORMAT = "fedveil-data/1"
ELSEWHERE = "not_here"
"""Key in the card of a run over several machines for the data that its server does not have."""


@dataclass(frozen=True)
class HandedOver:
    """Data and model that a program passes in instead of the configured ones; `model` is a module, or makes one."""

    data: Dataset | None = None
    partition: Partition | None = None
    model: object = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return which data were passed in: `data`, `partition`, both or neither."""
        return tuple(name for name in ("data", "partition") if getattr(self, name) is not None)


NOTHING = HandedOver()


def recorded(config: Config, handed_over: HandedOver) -> Config:
    """Return the configuration to record, which describes what was passed in instead of what was configured."""
    data, partition = handed_over.data, handed_over.partition
    if not handed_over.names:
        return config
    changes: dict[str, Any] = {"handed_over": handed_over.names}
    if data is not None:
        config = config.model_copy(update={"data": by_own_clients(config.data, data)})
        changes |= {"name": data.info.name, "data_dir": None, "source": None}
    if partition is not None:
        changes["partition"] = {"kind": partition.kind, "clients": len(partition)}
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


def same_handed_over(saved: Config, handed_over: HandedOver, path: Path) -> None:
    """Refuse a run directory's configuration unless exactly the same kinds of data are passed in again.

    Raises:
        ConfigError: something is missing, or was not passed in before.
    """
    require_handed_over(saved.data, handed_over.data, handed_over.partition)
    if handed_over.names and handed_over.names != saved.data.handed_over:
        before = " and ".join(saved.data.handed_over) or "nothing"
        raise ConfigError(
            f"{' and '.join(handed_over.names)} handed over, but the run in {path} was made with {before} handed over: leave out "
            f"what was configured"
        )


def how_to_resume(path: Path, experiment: Experiment) -> str:
    """Return the command or the call that continues an interrupted run."""
    again = [f"{name}=..." for name in experiment.data.section.handed_over]
    model = experiment.network.name == HANDED_OVER
    if not again and not model:
        return f"fedveil run --resume {path}{' --trust-plugins' * bool(experiment.code)}"
    made = f"fv.load_config({str(path / 'config.toml')!r}, model=...)" if model else "config"
    return f"fv.train({', '.join([made, repr(str(path)), 'resume=True', *again])}) in Python"


def info_of(path: Path) -> Info:
    """Return the facts about the data in the card of a run directory.

    Raises:
        ConfigError: the card is missing or damaged.
    """
    try:
        saved = json.loads((path / CARD).read_text(encoding="utf-8"))
        labels, constants, examples = saved["labels"], saved["normalisation"], saved["examples"]
        target = Targets(tuple(labels["shape"]), labels["dtype"], tuple(labels["names"]), labels["unit"])
        shape, means, stds = (tuple(part) for part in (examples["shape"], constants["mean"], constants["std"]))
        sizes = saved["train_examples"], saved["test_examples"], saved["named_clients"]
        info = Info(saved["name"], "", shape, labels["classes"], *sizes, saved["source"], False, means, stds, constants["scale"])
        return replace(info, target=target, vocabulary=examples["vocabulary"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path / CARD} cannot be read ({error}): give the directory of a run of this version") from None


def write_card(path: Path, spec: DataSpec, prepared: Prepared) -> None:
    """Write the card, and a new salt in the private folder."""
    write_json(path / CARD, card(spec, prepared, new_salt(path)))


def new_salt(path: Path) -> bytes:
    """Write a new salt to the private folder of the run directory `path`, and return it."""
    salt = secrets.token_bytes(32)
    write_bytes(private_folder(path) / SALT, salt)
    return salt


def card(spec: DataSpec, prepared: Prepared, salt: bytes) -> dict[str, Any]:
    """Return the content of the card for these data."""
    dataset, section, population = prepared.dataset, spec.section, prepared.population
    info, by_program = dataset.info, section.handed_over
    public = {
        "name": info.name,
        "source": "handed over by a program" if "data" in by_program else f"configured: {info.source}",
        "examples": {"shape": list(info.input_shape), "dtype": str(dataset.x_train.dtype), "vocabulary": info.vocabulary}
        | ({"features_of": info.features_of} if info.features_of else {})
        | ({"features": section.features, "public": spec.public.model_dump()} if section.features is not None else {}),
        "labels": {**asdict(info.target), "classes": info.classes},
        "origin": None if dataset.origin is None else dataset.origin.public,
        "train_examples": len(dataset.y_train) if prepared.declared is None else population.data.train_size,
        "test_examples": len(dataset.y_test),
        "normalisation": {"scale": info.scale, "mean": info.mean, "std": info.std},
        "clients": population.clients,
        "named_clients": population.data.users,
        "nominal_examples_per_client": population.records,
        "partition": {
            "source": "handed over by a program" if "partition" in by_program else "configured",
            "kind": prepared.partition.kind,
            "options": {} if "partition" in by_program else {k: v for k, v in section.partition.items() if k != "kind"},
        },
        "client_test_fraction": section.client_test_fraction,
        "public_fraction": section.public_fraction,
    } | ({} if prepared.declared is None else {ELSEWHERE: "the clients' examples, on machines of their own"})
    keyed = {"algorithm": "HMAC-SHA-256, key in private/salt", **digests(prepared, salt)}
    return {"format": FORMAT, **plain(public), "digests": keyed, "treated_as_public": list(public)}


def digests(prepared: Prepared, salt: bytes) -> dict[str, str]:
    """Return keyed digests of the content of the data and of the partition."""
    d, clients = prepared.dataset, prepared.partition.clients
    data = (d.x_train, d.y_train, d.x_test, d.y_test, d.users_train, d.users_test)
    return {"data": _digest(salt, data), "partition": _digest(salt, (clients.order, clients.offsets))}


def _digest(salt: bytes, arrays: Iterable[NDArray[Any] | None]) -> str:
    """Return a digest over type, shape and content of each array."""
    digest = hmac.new(salt, digestmod=hashlib.sha256)
    for array in arrays:
        digest.update(b"none\n" if array is None else f"{array.dtype.str} {array.shape}\n".encode())
        if array is not None:
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def check_data(path: Path, prepared: Prepared) -> None:
    """Check data and partition against the card of the run directory `path`; earlier versions wrote no card.

    Raises:
        ConfigError: they differ, or the card or the salt cannot be read.
    """
    if not (path / CARD).exists():
        return
    try:
        saved = json.loads((path / CARD).read_text(encoding="utf-8"))["digests"]
        salt = (path / PRIVATE / SALT).read_bytes()
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"cannot check the data against {path} ({error}): it needs {CARD} and {PRIVATE}/{SALT}, so use the run directory "
            f"itself, not a published copy"
        ) from None
    wrong = [name for name, digest in digests(prepared, salt).items() if not hmac.compare_digest(str(saved.get(name)), digest)]
    if wrong:
        raise ConfigError(
            f"other {' and '.join(wrong)} than those of the run in {path} (its {CARD} holds other digests): give what it was "
            f"trained on"
        )


def _require_here(path: Path) -> None:
    """Refuse a run directory whose card says that the data are elsewhere; an unreadable card is left to `check_data`."""
    try:
        elsewhere = ELSEWHERE in json.loads((path / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    if elsewhere:
        raise ConfigError(
            f"{path} is a run over several machines, whose clients' examples are not on this one: give {path / 'config.toml'} if "
            f"this machine has the data that it names, or another configuration with its sections method, training and privacy"
        )


def reopened(path: Path, handed_over: HandedOver = NOTHING) -> tuple[Experiment, Prepared]:
    """Return experiment and data of the run directory `path`; what was passed in must be passed in again, and is checked.

    Raises:
        ConfigError: not a run directory, one over several machines, or as `same_handed_over` and `check_data`.
    """
    config = load_recorded(path)
    _require_here(path)
    if handed_over.model is not None:
        config = with_model(config, handed_over.model)
    same_handed_over(config, handed_over, path)
    experiment, prepared = opened(config, handed_over.data, handed_over.partition)
    check_data(path, prepared)
    return experiment, prepared
