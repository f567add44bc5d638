"""A client's consent (`consent.toml`), and the check of an offered run against it.

The client certifies the offered configuration itself. It trusts no number that the server sends.
"""

from __future__ import annotations

import math
import pickle
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedveil.accounting.types import Adjacency, Event, Gaussian, SampledGaussian, Scope, Unit, View, at_most, small
from fedveil.data.own.data_source import TableSource, whole_path
from fedveil.errors import ConfigError, FedveilError, refusal
from fedveil.experiment.child_process import ChildHung, Stage, in_child
from fedveil.experiment.config import toml_values
from fedveil.experiment.public_setting import layout_of, population_of
from fedveil.experiment.resolve import resolve
from fedveil.experiment.sections import PluginMethod, PluginTask
from fedveil.experiment.shared_budget import planned_charges
from fedveil.mechanism.cost import event_of
from fedveil.mechanism.plan import LocalDpSgd, Plan, Raw, in_shares
from fedveil.methods.method import Schedule
from fedveil.methods.run_cost import ROUNDING, noise_of

if TYPE_CHECKING:
    from fedveil.experiment.config import Config
    from fedveil.experiment.experiment import Experiment
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting
    from fedveil.statement.statement import Statement

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ConsentRefused(ConfigError):
    """Raised for a run that exceeds the client's consent; nothing was charged."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Lifetime(_Section):
    """Cap on the total cost of all runs in one view.

    order: Renyi order at which runs with secret samples are added up; if omitted, they count as if every client took part in
    every round.
    """

    epsilon: Positive
    delta: float = Field(gt=0, lt=1)
    order: float | None = Field(None, gt=1)


class OwnData(_Section):
    """Location of this client's data: a file of its own, or (for demonstrations) a part of data that fedveil provides.

    columns: of the file, those that runs may train on. part: with a file, the part of it that the configured partition gives.
    """

    file: str | None = None
    columns: tuple[str, ...] = ()
    part: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _one(self) -> OwnData:
        if self.file is None and self.part is None:
            raise ConfigError(
                "data: give file, the path of this client's table, or part, the number of a part of the configured data"
            )
        if bool(self.columns) != (self.file is not None):
            raise ConfigError(
                "data.columns: name the columns of data.file that runs may train on, and leave it out without a file"
            )
        return self


class Limits(_Section):
    """Limits on a run's work, judged by its configuration alone: nothing here depends on the client's examples.

    parameters: of the model. rounds, clients: of the run. steps: local steps per round, and any number of steps of the method.
    seconds: for checking an offer. round_seconds: for the training of a round; a longer one counts as failed.
    message_bytes: of a message to this client; by default what the parameters need. memory_bytes: of this client's process.
    """

    parameters: int = Field(25_000_000, ge=1)
    rounds: int = Field(10_000, ge=1)
    clients: int = Field(1_000_000, ge=1)
    steps: int = Field(100_000, ge=1)
    seconds: Positive = 60.0
    round_seconds: Positive | None = None
    message_bytes: int | None = Field(None, ge=2**20)
    memory_bytes: int | None = Field(None, ge=2**29)

    @classmethod
    def none(cls, parameters: int) -> Limits:
        """Return limits that are practically infinite, except for the size of messages, for a model with so many parameters."""
        most = 2**62
        return cls(parameters=parameters, rounds=most, clients=most, steps=most, seconds=float(most))

    @property
    def message(self) -> int:
        """Return the largest size of a message to this client in bytes: a round has a few vectors as long as the model."""
        needed = 64 * self.parameters + 2**23
        return needed if self.message_bytes is None else min(needed, self.message_bytes)

    @property
    def memory(self) -> int:
        """Return the memory limit of the SuperNode in bytes; it holds a message before it is checked."""
        return self.message + 2**30


class Consent(_Section):
    """Consent of a client.

    lifetime: a cap for each view in which it takes part; a view without one is refused.
    unit, adjacency: which these caps refer to. least_noise: smallest noise multiplier of any release.
    seeded_noise: whether noise that the server could compute is allowed; it protects nobody.
    trust: names of installed distributions whose methods and tasks runs may name. limits: on work.
    until: the last day (UTC) on which it takes part, or None.
    secure_aggregation: `required` if the server may get this client's updates under masks only, where it would add the noise.
    roster: digest that `fedveil net roster` prints, compared with the other institutions; runs under masks need it.
    least_set, least_colluders: smallest set whose sum may be opened, and smallest number of keys of the roster that may belong to
    the server or to a client that works with it.
    """

    data: OwnData
    lifetime: dict[View, Lifetime] = Field(min_length=1)
    unit: Unit = Unit.CLIENT
    adjacency: Adjacency = Adjacency.ZERO_OUT
    least_noise: float = Field(0.0, ge=0)
    seeded_noise: bool = False
    trust: tuple[str, ...] = ()
    limits: Limits = Limits()
    secure_aggregation: Literal["allowed", "required"] = "allowed"
    roster: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    least_set: int = Field(0, ge=0)
    least_colluders: int = Field(0, ge=0)
    until: date | None = None


def require_not_ended(consent: Consent, now: datetime | None = None) -> None:
    """Refuse everything after the consent's last day.

    Raises:
        ConsentRefused: it has ended.
    """
    if consent.until is not None and (now or datetime.now(UTC)).astimezone(UTC).date() > consent.until:
        raise ConsentRefused(f"this client's consent ended on {consent.until} (until in its consent.toml)")


class ConsentFile:
    """Consent in a file, which is read again when the file changes."""

    def __init__(self, path: Path) -> None:
        self.path, self._read = path, b""

    def read(self) -> Consent:
        """Return the consent; raise ConfigError as `read_consent_file`."""
        self._read = self._content()
        return read_consent_file(self.path)

    def changed(self) -> Consent | ConfigError | None:
        """Return the consent if the file has changed since it was read, or why it cannot be read; else None."""
        if self._content() == self._read:
            return None
        try:
            return self.read()
        except ConfigError as problem:
            return problem

    def _content(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError:
            return b""


@dataclass(frozen=True)
class AcceptedRun:
    """An accepted run, as resolved by the client itself."""

    experiment: Experiment

    @property
    def method(self) -> Method:
        return self.experiment.method

    @property
    def setting(self) -> Setting:
        return self.experiment.setting

    @property
    def statement(self) -> Statement:
        return self.experiment.statement


def read_consent_file(path: Path) -> Consent:
    """Return the consent in a file; its data's path is relative to the file.

    Raises:
        ConfigError: the file cannot be read, or its content is invalid.
    """
    try:
        raw: dict[str, Any] = toml_values(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"cannot read the consent {path}: {problem}") from None
    data = raw.get("data")
    if isinstance(data, dict) and isinstance(data.get("file"), str):
        data["file"] = whole_path(data["file"], path.absolute().parent)
    try:
        return Consent.model_validate(raw)
    except ValidationError as error:
        raise refusal(error, Consent) from None


def judged_in_time(consent: Consent, config: Config) -> AcceptedRun:
    """Call `check_offer` in a child process that is killed after `limits.seconds` (on Linux).

    Raises:
        ConsentRefused: as for `check_offer`, or because it takes longer.
    """

    def judge(stage: Stage) -> list[str]:
        try:
            return ["judged", b64encode(pickle.dumps(check_offer(consent, config))).decode("ascii")]
        except FedveilError as refusal:
            return ["refused", str(refusal)]

    try:
        kind, content = in_child(judge, "judging the run", consent.limits.seconds)
    except ChildHung:
        raise ConsentRefused(
            f"judging the run takes longer than limits.seconds = {consent.limits.seconds:g} of this client's consent: the client "
            f"may raise that limit, or the server offer a smaller run"
        ) from None
    if kind == "refused":
        raise ConsentRefused(content)
    accepted: AcceptedRun = pickle.loads(b64decode(content))  # written by this process a moment ago
    return accepted


def check_offer(consent: Consent, config: Config) -> AcceptedRun:
    """Return the offered run if the consent covers it; `client_ledger` checks what remains of the lifetime.

    Raises:
        ConsentRefused: the consent does not cover it, with the reason.
    """
    scope = Scope(config.privacy.unit, config.privacy.adjacency, config.privacy.view)
    require_not_ended(consent)
    _refuse_code(consent, config)
    _refuse_columns(consent, config)
    _refuse_work(consent.limits, config)
    if scope.view not in consent.lifetime:
        allowed = ", ".join(consent.lifetime)
        raise ConsentRefused(f"privacy.view = {str(scope.view)!r}: this client takes part in {allowed} only")
    if (scope.unit, scope.adjacency) != (consent.unit, consent.adjacency):
        caps = Scope(consent.unit, consent.adjacency, scope.view)
        raise ConsentRefused(f"the run's guarantee is for {scope}, and this client's caps of {caps}")
    if config.run.seeded_noise and not consent.seeded_noise:
        raise ConsentRefused("run.seeded_noise = true: the server could compute the noise, which protects nobody")
    _refuse_unmasked(consent, config)
    experiment = resolve(config)
    statement, setting = experiment.statement, experiment.setting
    _refuse_small_sets(consent, setting)
    if not math.isfinite(statement.proven.epsilon):
        raise ConsentRefused(f"nothing is proven of this run ({statement.proven.reason or 'epsilon is infinite'})")
    cap = consent.lifetime[scope.view]
    if statement.proven.epsilon > cap.epsilon and statement.proven.delta >= cap.delta:
        raise ConsentRefused(
            f"the run has epsilon = {at_most(statement.proven.epsilon)} at delta = {small(statement.proven.delta)}, and "
            f"this client's lifetime is epsilon = {cap.epsilon:g} at delta = {small(cap.delta)}"
        )
    if setting.z < consent.least_noise:
        raise ConsentRefused(f"the noise multiplier is {setting.z:.4g}, and this client asks for {consent.least_noise:g}")
    release = experiment.method.release(setting)
    if consent.least_noise and isinstance(release, Schedule) and not setting.groups:
        for t in range(setting.rounds):
            require_noise(consent, setting, release.plan(setting, t))
    return AcceptedRun(experiment)


def _refuse_unmasked(consent: Consent, config: Config) -> None:
    """Refuse a run that trusts the server with more than sums, if the consent does not, and one whose masks protect nothing."""
    masks, place = config.run.secure_aggregation, config.privacy.noise_place
    if masks != "on" and (masks == "simulate" or place == "shares"):
        raise ConsentRefused(
            f"run.secure_aggregation = {masks!r} with privacy.noise_place = {place!r}: over several machines the server would "
            f"get this client's update with a share of the noise alone; set run.secure_aggregation = 'on'"
        )
    if masks == "on" and consent.roster is None:
        raise ConsentRefused(
            "run.secure_aggregation = 'on': this client's consent pins no roster: compare the digest that fedveil net roster "
            "prints with the other institutions, and write it into the consent as roster"
        )
    if masks != "on" and consent.secure_aggregation == "required" and config.privacy.view is not View.SERVER:
        raise ConsentRefused(
            f"run.secure_aggregation = {masks!r} in the {config.privacy.view} view: the server would get this client's update "
            f"without noise, and its consent asks for masks (secure_aggregation = 'required')"
        )


def _refuse_small_sets(consent: Consent, setting: Setting) -> None:
    if setting.secure_aggregation != "on":
        return
    if setting.least_set < consent.least_set:
        raise ConsentRefused(
            f"the run opens sums of {setting.least_set} clients or more (privacy.min_survivors), and this client asks for sets "
            f"of {consent.least_set} or more (least_set)"
        )
    if setting.known_shares < consent.least_colluders:
        raise ConsentRefused(
            f"the run's guarantee holds if at most {setting.known_shares} keys belong to the server or its accomplices "
            f"(privacy.colluders), and this client asks for {consent.least_colluders} or more (least_colluders)"
        )


def require_noise(consent: Consent, setting: Setting, plan: Plan | Raw) -> None:
    """Refuse a release with less noise than the client requires; adaptive plans are checked when they are made.

    Raises:
        ConsentRefused: it has less noise, by more than a rounding error.
    """
    multiplier = noise_of(plan, setting)
    if multiplier < consent.least_noise * (1 - ROUNDING):
        raise ConsentRefused(
            f"the noise multiplier is {multiplier:.4g} in one of its rounds, and this client asks for {consent.least_noise:g}"
        )


def require_price(accepted: AcceptedRun, plan: Plan | Raw) -> None:
    """Refuse a DP-SGD round that costs more than any planned one, in views where these were charged in advance.

    In these views a plan adapts to the server's messages, and its cost is not checked elsewhere.

    Raises:
        ConsentRefused: the round costs more.
    """
    s = accepted.setting
    if s.scope.view is View.SERVER or not isinstance(plan, LocalDpSgd):
        return
    event = event_of(plan, s.layout, s.scope, rate=None)
    if not any(_covers(planned, event) for planned in planned_charges(accepted.method, s)):
        raise ConsentRefused(f"this round would cost {event}, and this client consented to a run in which every round costs less")


def require_share(accepted: AcceptedRun, plan: Plan, members: int) -> None:
    """Refuse a sum of a set of so many clients that costs more than any planned one, or of more than a round has.

    In a larger set each share is smaller, and a client that is the only honest one has its share alone.

    Raises:
        ConsentRefused: the sum costs more, or the set is too large.
    """
    s = accepted.setting
    if members > s.cohort:
        raise ConsentRefused(f"a set of {members} clients, and a round of this run has {s.cohort} (training.clients_per_round)")
    honest = members - s.known_shares
    event = event_of(in_shares(plan, honest), s.layout, s.scope, rate=None, noisy_uploads=honest)
    planned = planned_charges(accepted.method, s)
    if not any(isinstance(e, Gaussian) and isinstance(event, Gaussian) and event.mu <= e.mu * (1 + ROUNDING) for e in planned):
        raise ConsentRefused(f"this round would cost {event}, and this client consented to a run in which every round costs less")


def _covers(planned: Event, event: Event) -> bool:
    """Return whether DP-SGD rounds charged as `planned` include one that costs `event`."""
    return (
        isinstance(planned, SampledGaussian)
        and isinstance(event, SampledGaussian)
        and event.rate <= planned.rate
        and event.count <= planned.count
        and event.noise_multiplier >= planned.noise_multiplier * (1 - ROUNDING)
    )


def _refuse_code(consent: Consent, config: Config) -> None:
    """Refuse code that the server names, except from distributions that are installed here and trusted by the consent."""
    trusted = [point for point in config.installed if point.dist is not None and point.dist.name in consent.trust]
    modules, known = {point.module for point in trusted}, {point.name.partition(".")[2] for point in trusted}
    plugins = [part.name for part in (config.task, config.method) if isinstance(part, PluginTask | PluginMethod)]
    if named := [*(code for code in config.code if code not in modules), *(name for name in plugins if name not in known)]:
        raise ConsentRefused(
            f"the run needs code of its own ({', '.join(named)}), and this client does not run code named by a server"
        )
    if config.data.handed_over:
        raise ConsentRefused("data.handed_over: the server's program made the data, and this client has its own")
    if not config.model.plain:
        raise ConsentRefused("model: this client runs only fedveil's own networks, given by name")


def _refuse_work(limits: Limits, config: Config) -> None:
    """Refuse more work than the client agreed to, before any of it is done."""
    population, training = population_of(config), config.training
    epochs = training.local_epochs if training.local_steps is None else 0
    batches = -(-population.records // training.batch_size)
    asked = {
        "training.rounds": (training.rounds, "rounds"),
        "data.partition: the number of clients": (population.clients, "clients"),
        "training.local_steps": (training.local_steps or epochs * batches, "steps"),
        "training.local_epochs": (epochs, "steps"),
        **{f"model.{key}": (value, "parameters") for key, value in _whole(config.model.options.model_dump())},
        **{f"method.{key}": (value, "steps") for key, value in _whole(config.method.model_dump()) if not key.endswith("seed")},
    }
    if not (wrong := _beyond(limits, asked)):
        layout = layout_of(config, population.data)
        wrong = _beyond(limits, {"model: the number of parameters": (layout.dimension, "parameters")})
        wrong = wrong or _message_beyond(limits, layout.dimension)
    if wrong:
        raise ConsentRefused(f"{wrong} of this client's consent: offer a smaller run, or raise the limit in consent.toml")


def _beyond(limits: Limits, asked: dict[str, tuple[int, str]]) -> str:
    """Return a message for the first number above its limit, or an empty string."""
    limited = ((key, value, name, getattr(limits, name)) for key, (value, name) in asked.items())
    return next((f"{key} is {value:,}, and limits.{name} is {most:,}" for key, value, name, most in limited if value > most), "")


def _message_beyond(limits: Limits, dimension: int) -> str:
    """Return a message if a round's model alone, as float32, exceeds the limit on messages, or an empty string."""
    if limits.message_bytes is None or 4 * dimension <= limits.message_bytes:
        return ""
    return f"model: one has {4 * dimension:,} bytes, and limits.message_bytes is {limits.message_bytes:,}"


def _whole(options: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers among options; those in lists get the name of the list."""
    for key, value in options.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if type(one) is int:
                yield key, one


def _refuse_columns(consent: Consent, config: Config) -> None:
    """Refuse a run that reads columns of the client's table which the consent does not name."""
    source = config.data.source
    if consent.data.file is None or not isinstance(source, TableSource):
        return
    latest = [] if source.test is None or source.test.latest is None else [source.test.latest]
    owner = [] if consent.data.part is None or source.client is None else [source.client]
    asked = dict.fromkeys([*source.features, *source.targets, *latest, *owner])
    if others := [column for column in asked if column not in consent.data.columns]:
        raise ConsentRefused(f"data.source: this client's consent does not allow the columns {', '.join(others)}")
