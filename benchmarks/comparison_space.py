"""What the comparison of methods tries: which methods, which values of which keys, and the looks that one rule draws from them.

Every method gets the same number of looks. The first is the recipe of the preset with the method's own defaults, as they were
when the looks were taken: they are written out, since some changed by what was found. The others are drawn without regard to any
result. The values of a knob are spread evenly over the looks (a Latin hypercube), by a seed that is the knob's name: shared knobs
have the same values in the same look of every method.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LOOKS = 12
ROUNDS, COHORT, STEPS = 40, 100, 5
CLIENT_ROUNDS = ROUNDS * COHORT
PRESET = "utility/fashion-mnist"
PROXY = "mnist"
TUNED_AT = {0.25: 0.5, 0.5: 0.5, 1.0: 0.5, 2.0: 4.0, 8.0: 4.0}
"""For each epsilon of the comparison, that of the looks by which its setting is chosen."""
EPSILONS = tuple(TUNED_AT)
SEEDS = (1, 2, 3, 4, 5)
REFERENCE = "dp-fedavg"
PARTITIONS: dict[str, str] = {
    "iid": "{kind='iid', clients=1000, examples_per_client=60}",
    "dirichlet": "{kind='dirichlet', clients=1000, alpha=0.5, min_size=5, too_small='top-up'}",
}
SHARED: dict[str, list[Any]] = {
    "clip": [0.05, 0.02, 0.2, 0.5],
    "server lr": [0.01875, 0.009375, 0.0375],
    "local lr": [0.16, 0.04, 0.64],
}
"""Clip C; server rate relative to it, over 40 rounds; local rate. The first of each is the preset's, at a third of its rounds."""
COHORTS: list[Any] = [1000, 400, 100]
"""Clients a round where samples are not amplified: with more of them rounds are fewer, and the server's rate is higher."""
Setting = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A method of the comparison.

    Args:
        own: values by key of its section, the default first. scale: its clip is this multiple of the shared one.
        fixed: it takes no Poisson samples. cohorts: it tries several numbers of clients a round. steps: it clips each of the
            local gradients instead of the update, so that the longest update is as long as the clip. heavy: its runs take several
            times as long.
    """

    own: dict[str, list[Any]] = field(default_factory=dict)
    scale: float = 1.0
    fixed: bool = False
    cohorts: bool = False
    steps: bool = False
    heavy: bool = False


METHODS: dict[str, Entry] = {
    "dp-fedavg": Entry(),
    "adaptive-clipping": Entry({"quantile": [0.5, 0.2, 0.8], "rate": [0.2, 0.05]}),
    "banded-mf": Entry({"separation": [10, 5, 2]}, fixed=True),
    "ladp-fl": Entry({"spread": [4.0, 1.5, 16.0], "bound": [1e-4, 1e-2], "clipping": ["layers", "whole"]}),
    "aldp-fl": Entry({"clip_range": [[0.5, 4.0], [0.5, 1.0], [0.8, 1.25]], "headroom": [1.5, 1.0, 3.0], "window": [3, 10]}),
    "fedanc": Entry({"gamma_min": [0.1, 0.4, 0.8], "exploration": [0.1, 0.5], "pace": [4.0, 1.5]}),
    "fedglp-adp": Entry(
        {"gamma": [0.4, 0.05, 0.0], "beta0": [0.3, 0.1, 0.03], "slope": [0.2, 0.0], "personal_model": ["trained", "combined"]}
    ),
    "dp-scaffold": Entry({"control_clip": [1.0, 0.2, 0.05], "control_share": [0.25, 0.1, 0.5]}),
    "noisy-fedprox": Entry({"proximal": [0.1, 0.01, 1.0]}, fixed=True, cohorts=True, steps=True),
    "noisy-fedavg": Entry(fixed=True, cohorts=True, steps=True),
    "ldp-fed": Entry({"layers_a_round": [0, 1]}),
    "time-varying-dp": Entry({"decay": [0.998, 0.98, 0.95]}),
    "dpa-ldp": Entry({"contraction": [0.995, 0.97, 0.9]}),
    "sensitive-dp": Entry({"headroom": [2.0, 1.0, 4.0], "own": [0.5, 0.0, 1.0], "clip_range": [[0.1, 2.0], [0.5, 1.0]]}),
    "fed-smp": Entry({"share": [0.1, 0.4, 0.8], "mask": ["random", "moved"]}),
    "gfl-aldpa": Entry({"keep": [0.1, 0.4, 0.8], "growth": [1.0, 0.3, 0.1]}, fixed=True, cohorts=True),
    "adapldp": Entry({"turn": [0.02, 0.1, 0.5]}, fixed=True, cohorts=True),
    "nbafl": Entry(scale=40.0, fixed=True, cohorts=True),
    "blur-lus": Entry({"blur": [0.4, 0.0, 0.1], "drop": [0.4, 0.0, 0.2]}),
    "dp-fedsam": Entry({"rho": [0.05, 0.01, 0.2], "keep": [1.0, 0.4]}),
    "time-adaptive": Entry({"save_until": [[0.25], [0.5], [0.75]], "saving": [0.5, 0.25, 0.8]}),
    "fed-addp": Entry({"beta": [0.1, 0.3, 1.0], "threshold": [0.4, 0.1, 0.8], "lambda1": [0.1, 0.0]}, heavy=True),
    "fed-dpa": Entry({"threshold": [0.4, 0.1, 0.8], "lambda1": [0.1, 0.0]}, heavy=True),
}
LEFT_OUT = {
    "adap-dp-fl": "adapts DP-SGD inside the clients, which protects records; the comparison is at client level",
    "fedavg": "has no noise of its own",
    "soteria, censor, gradient-compression": "defences without a guarantee",
}


@dataclass(frozen=True)
class Contest:
    """Methods that are tuned by one score and compared by it.

    Args:
        partitions: of the comparison; the looks have the first. score: test accuracy of the global model, or the mean `personal`
            accuracy of the clients' own models. public: data declared to be public. chosen: contest whose settings it takes over.
    """

    methods: tuple[str, ...]
    partitions: tuple[str, ...]
    score: str = "accuracy"
    public: tuple[str, ...] = ("shapes",)
    chosen: str = ""


CONTESTS: dict[str, Contest] = {
    "global": Contest(tuple(name for name, entry in METHODS.items() if not entry.heavy), ("iid", "dirichlet")),
    "personal": Contest(("dp-fedavg", "fedglp-adp", "fed-addp", "fed-dpa"), ("dirichlet",), "personal"),
    "public": Contest(("dp-fedavg", "adaptive-clipping", "banded-mf"), ("iid",), public=("shapes", PROXY), chosen="global"),
}
"""DP-FedAvg's personal models are its last global one, trained on by each client for itself."""


def spread(knob: str, values: list[Any]) -> list[Any]:
    """The first value, then LOOKS - 1 more, each value as often as the others as far as that goes, in an order of its own."""
    drawn = random.Random(knob).sample(values, len(values))
    rest = [drawn[i % len(drawn)] for i in range(LOOKS - 1)]
    random.Random(f"{knob}, order").shuffle(rest)
    return [values[0], *rest]


def looks(method: str) -> list[Setting]:
    """The settings that are tried of a method: shared knobs by their names, its own by their keys."""
    entry = METHODS[method]
    knobs = {name: spread(name, values) for name, values in SHARED.items()}
    knobs |= {f"method.{key}": spread(f"{method} {key}", values) for key, values in entry.own.items()}
    if entry.cohorts:
        knobs["cohort"] = spread("cohort", COHORTS)
    return [{knob: values[i] for knob, values in knobs.items()} for i in range(LOOKS)]


def overrides(method: str, setting: Setting) -> list[str]:
    """What `--set` would say to turn the preset into this setting."""
    entry, cohort = METHODS[method], setting.get("cohort", COHORT)
    rounds = CLIENT_ROUNDS // cohort
    clip, rate = setting["clip"] * entry.scale, setting["local lr"]
    section = {key.removeprefix("method."): value for key, value in setting.items() if key.startswith("method.")}
    found = [
        f"method={toml({'name': method, **({} if entry.steps else {'clip': clip}), **section})}",
        f"training.rounds={rounds}",
        f"training.clients_per_round={cohort}",
        f"training.local_steps={STEPS}",
        f"training.optimizer.lr={rate}",
        f"training.server_optimizer.lr={setting['server lr'] * ROUNDS / rounds:.6g}",
    ]
    if entry.fixed:
        found.append("training.sampling=fixed")
    if entry.steps:
        found.append(f"training.batch_clip={clip / (STEPS * rate):.6g}")
    return found


def toml(section: dict[str, Any]) -> str:
    """An inline table; numbers, strings and lists of them are written alike in JSON and TOML."""
    return "{" + ", ".join(f"{key}={json.dumps(value)}" for key, value in section.items()) + "}"


# --- what is to be done -------------------------------------------------------------------------------------------------

Found = dict[str, dict[str, Any]]
"""What came of each finished run, by its key."""


class Job(NamedTuple):
    """One run: of a contest, in the phase `tune` or `compare`, with a setting that is a look's number."""

    contest: str
    phase: str
    method: str
    partition: str
    epsilon: float
    seed: int
    look: int

    @property
    def key(self) -> str:
        """Its name among the results. The look of a comparison is a result and no part of the name."""
        parts = (self.contest, self.phase, self.method, self.partition, f"{self.epsilon:g}", str(self.seed))
        return " ".join((*parts, str(self.look)) if self.phase == "tune" else parts)


def tuning(contest: str, method: str, tuned_at: float) -> list[Job]:
    """All looks at a method, at one of the epsilons that settings are chosen at."""
    partition = CONTESTS[contest].partitions[0]
    return [Job(contest, "tune", method, partition, tuned_at, SEEDS[0], look) for look in range(LOOKS)]


def choice(found: Found, contest: str, method: str, epsilon: float) -> int | None:
    """The look with the best score on MNIST; None before all were taken, or where none could be."""
    from_contest = CONTESTS[contest].chosen or contest
    looked = tuning(from_contest, method, TUNED_AT[epsilon])
    if any(job.key not in found for job in looked):
        return None
    score = CONTESTS[from_contest].score
    scores = {job.look: float(found[job.key][score]) for job in looked if "error" not in found[job.key]}
    return max(scores, key=lambda look: scores[look]) if scores else None


def all_looks() -> list[Job]:
    """Every run by which settings are chosen, slow ones at the end."""
    entered = [(contest, method) for contest, own in CONTESTS.items() for method in own.methods if not own.chosen]
    entered.sort(key=lambda pair: METHODS[pair[1]].heavy)
    return [job for pair in entered for at in dict.fromkeys(TUNED_AT.values()) for job in tuning(*pair, at)]


def all_cells() -> list[Job]:
    """Every run of the comparison, those that tell most first; its look is known when all looks are taken."""
    cells = [
        Job(contest, "compare", method, partition, epsilon, seed, -1)
        for seed in SEEDS
        for partition in PARTITIONS
        for contest, entered in CONTESTS.items()
        for method in entered.methods
        for epsilon in EPSILONS
        if partition in entered.partitions
    ]
    return sorted(cells, key=lambda job: METHODS[job.method].heavy)
