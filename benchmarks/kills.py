"""Server and clients as processes with TLS, each killed with SIGKILL again and again: python benchmarks/kills.py --kills 100.

A run of a few rounds is repeated until there were so many kills: server and clients at each point of a round by their own hand
(tests/support/kill_points.py), Flower's SuperLink and SuperNodes at random times. After each run the model must be that of the
inline engine to the bit, the run verified, and each client's ledger hold each release of the server's.

With --masks the clients have secure aggregation. A round that is broken off then takes another attempt, with other noise, so the
model is another one; no attempt may have been answered twice, and none with another set than the server's.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from fedveil.deploy.network_folder import NetworkFolder, make_client_key, make_network
from fedveil.deploy.programs import free_port
from fedveil.experiment.config import Config, configure
from fedveil.experiment.receipts import ATTEMPTS, compare_receipts
from fedveil.experiment.run import run
from fedveil.experiment.two_ledgers import compared
from fedveil.verify import verify_run
from harness import RESULTS, ROOT, arguments, keep

SUPPORT = ROOT / "tests" / "support"
sys.path.insert(0, str(SUPPORT))
from kill_points import BY_PROGRAM  # noqa: E402

CLIENTS = 4
"""Of a run; three would do without masks."""
FLOWER = ("flower-superlink", "flower-supernode")


def configuration(rounds: int, masks: bool) -> Config:
    """Small, with seeded noise, so that there is a model to compare with, or with masks."""
    data = {"name": "digits", "partition": {"kind": "iid", "clients": CLIENTS}}
    training = {"rounds": rounds, "clients_per_round": CLIENTS, "local_steps": 1, "batch_size": 16}
    model = {"name": "mlp", "hidden": [8]}
    if masks:
        shares = {"noise_place": "shares", "min_survivors": 3, "spare_attempts": 4 * rounds}
        return configure(
            method={"name": "dp-fedavg"},
            model=model,
            data=data,
            training=training,
            privacy={"epsilon": 8.0, "delta": 0.01, "view": "aggregate", **shares},
            run={"seed": 3, "secure_aggregation": "on"},
        )
    return configure(
        method={"name": "fedglp-adp", "variant": "proven"},
        model=model,
        data=data,
        training=training | {"batch_clip": 1.0},
        privacy={"epsilon": 8.0, "delta": 0.01, "view": "server"},
        run={"seeded_noise": True, "seed": 3, "engine": "inline"},
    )


@dataclass
class Episode:
    """One run and its processes.

    Args:
        end: nothing is killed after it. kills: counted by what was killed, and where; before: those of earlier runs.
    """

    folder: Path
    rounds: int
    rng: random.Random
    end: float
    before: Counter[str]
    masks: bool = False
    kills: Counter[str] = field(default_factory=Counter)
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    points: dict[int, str] = field(default_factory=dict)
    network: NetworkFolder | None = None

    def __post_init__(self) -> None:
        self.network = make_network(self.folder / "network", "127.0.0.1", free_port())
        inline = configuration(self.rounds, self.masks)
        plain = inline.model_dump(mode="json", exclude_none=True)
        (self.folder / "c.toml").write_text(tomli_w.dumps(plain))
        for number in range(CLIENTS):
            make_client_key(self.folder / f"key{number}")
            self.network.admit(self.folder / f"key{number}.pub")
        pinned = {"secure_aggregation": "required", "roster": self.network.roster.digest.hex()} if self.masks else {}
        for number in range(CLIENTS):
            caps = {view: {"epsilon": 8.001, "delta": 0.01} for view in ("server", "aggregate")}
            consent = {"data": {"part": number}, "lifetime": caps, "seeded_noise": True, **pinned}
            (self.folder / f"consent{number}.toml").write_text(tomli_w.dumps(consent))

    def start(self, who: int) -> None:
        """Start the server (-1) or a client, with the next point at which it kills itself; the server goes on where it was."""
        assert self.network is not None
        name = f"{'masked ' * self.masks}{'server' if who < 0 else 'client'}"
        points = list(BY_PROGRAM[name])
        self.rng.shuffle(points)
        point = min(points, key=lambda p: (self.before + self.kills)[f"{name}: {p}"])
        number = self.rng.randint(1, 3) * (time.monotonic() < self.end)
        self.points[who] = point
        if who < 0:
            begun = (self.folder / "run" / "ledger.sqlite").exists()
            what = ["serve", "--resume", "run"] if begun else ["serve", "c.toml", "--out", "run"]
            arguments = [*what, "--wait", str(CLIENTS), "--dir", str(self.network.path)]
        else:
            arguments = ["join", f"127.0.0.1:{self.network.port}", "--ca", str(self.network.authority), "--key", f"key{who}"]
            arguments += ["--consent", f"consent{who}.toml", "--dir", f"client{who}"]
        command = [sys.executable, str(SUPPORT / "killed_program.py"), name, point, str(number), *arguments]
        path = os.pathsep.join([str(ROOT / "src"), str(SUPPORT)])
        with open(self.folder / f"log{who}", "ab") as log:
            environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            self.processes[who] = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, env=environment)

    def go(self) -> bool:
        """Until the server has ended; returns whether it did, ten minutes after nothing is killed any more."""
        for who in range(-1, CLIENTS):
            self.start(who)
        next_child = time.monotonic() + self.rng.uniform(60, 180)
        while time.monotonic() < self.end + 600:
            for who, process in list(self.processes.items()):
                code = process.poll()
                if code is None:
                    continue
                if who < 0 and code == 0:
                    return True
                if who < 0 and "go on with --resume" in (self.folder / "log-1").read_text(errors="replace")[-300:]:
                    self.start(who)
                    continue
                if code != -signal.SIGKILL:
                    said = (self.folder / f"log{who}").read_text(errors="replace")[-3000:]
                    raise SystemExit(f"{'server' if who < 0 else f'client {who}'} ended with {code}: {said}")
                self.kills[f"{'masked ' * self.masks}{'server' if who < 0 else 'client'}: {self.points[who]}"] += 1
                self.start(who)
            if next_child < time.monotonic() < self.end:
                self.kill_child()
                next_child = time.monotonic() + self.rng.uniform(60, 180)
            time.sleep(0.2)
        return False

    def kill_child(self) -> None:
        """Kill one of Flower's own programs that we started."""
        name = self.rng.choice(FLOWER)
        own = {process.pid for process in self.processes.values()}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
                command = (path.parent / "cmdline").read_bytes().decode(errors="replace")
            except (OSError, ValueError):
                continue
            if parent in own and name in command:
                os.kill(int(path.parent.name), signal.SIGKILL)
                self.kills[name] += 1
                return

    def stop(self) -> None:
        """End what is left."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait()

    def checked(self) -> dict[str, object]:
        """What the run is held against."""
        out, clients = self.folder / "run", [self.folder / f"client{number}" for number in range(CLIENTS)]
        found = [*compare_receipts(out, clients), *(finding for folder in clients for finding in compared(out, folder))]
        if self.masks:
            named = _attempts(out / "private" / ATTEMPTS)
            own = [_attempts(path) for folder in clients for path in folder.glob(f"runs/*/{ATTEMPTS}")]
            right = {
                "attempts": len(named),
                "answered_twice": sum(len(rows) - len({attempt for attempt, _ in rows}) for rows in own),
                "with_another_set": sum(row not in named for rows in own for row in rows),
            }
        else:
            inline = run(configuration(self.rounds, False), self.folder / "inline")
            model = (inline.path / "model.safetensors").read_bytes()
            right = {"same_model": (out / "model.safetensors").read_bytes() == model}
        return {
            "kills": dict(self.kills),
            **right,
            "verified": verify_run(out).outcome,
            "ledgers": dict(Counter(finding.kind for finding in found)),
            "differences": [finding.text for finding in found if finding.kind != "verified"],
        }


def _attempts(path: Path) -> list[tuple[int, str]]:
    """Attempt and digest of the set, of each row of a file of attempts."""
    rows = map(json.loads, path.read_text().splitlines())
    return [(row["attempt"], row["set"]) for row in rows if "attempt" in row]


def main() -> None:
    """Kill, count, check, write."""
    asked = arguments(__doc__, kills=100, rounds=8, minutes=120.0, seed=0, out=RESULTS / "kills.json", masks=False)
    begin, runs, killed = time.monotonic(), list[dict[str, object]](), Counter[str]()
    end, complete = begin + 60 * asked.minutes, True
    while complete and killed.total() < asked.kills and time.monotonic() < end:
        with tempfile.TemporaryDirectory(prefix="fedveil-kills-") as folder:
            episode = Episode(Path(folder), asked.rounds, random.Random(asked.seed + len(runs)), end, killed.copy(), asked.masks)
            try:
                complete = episode.go()
            finally:
                episode.stop()
            if complete:
                runs.append(episode.checked())
                killed += episode.kills
                print(json.dumps(runs[-1]), flush=True)
        whole = {"kills": killed.total(), "by_point": dict(sorted(killed.items())), "minutes": (time.monotonic() - begin) / 60}
        keep(asked.out, whole | {"rounds_a_run": asked.rounds, "runs": runs})


if __name__ == "__main__":
    main()
