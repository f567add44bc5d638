"""What Flower costs: python benchmarks/flower.py --only turns parts grids deployment.

turns       a round of LeNet-5 (W1) inline, in Flower's simulation, and in plain Flower's simulation, in turns
parts       where a round over messages goes, without Flower in between, by function
grids       bytes of a release, part of its norm that is lost, and accuracy, for three grids (privacy.grid_bits)
deployment  seconds a round and memory by process (PSS) of a server and `--nodes` clients with TLS on this machine

Writes benchmarks/results/flower.json and docs/figures/flower.svg.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedveil.accounting.types import View
from fedveil.deploy import client_node, grid_engine
from fedveil.deploy.client_node import ClientNode, ClientStates
from fedveil.deploy.demo_network import demo
from fedveil.deploy.grid_engine import FlowerSimulation, GridEngine
from fedveil.drawing import blank, panels, quiet, style
from fedveil.drawing import save as save_figure
from fedveil.executors.inline import Inline
from fedveil.experiment.config import Config, configure
from fedveil.experiment.run import run
from fedveil.federation.fit import one_round
from fedveil.federation.progress import start
from fedveil.mechanism.grid import exponent_for, to_grid
from fedveil.methods.fedavg import DPFedAvg
from fedveil.release.release_layout import NullLedger
from harness import FIGURES, HERE, arguments
from peers.flower_deployed import deployed
from sides import descendants, federation, held_bytes, loaded, ours, program, save, setting, together

GRIDS = (8, 16, 24)
NAMES = {"flower-superlink": "SuperLink", "flower-supernode": "SuperNode", "fedveil join": "client", "fedveil.join": "client"}
NAMES |= {"flwr-serverapp": "ServerApp", "flwr-clientapp": "ClientApp"}


def turns(rounds: int) -> None:
    """Three sides, all of them open at once."""
    plain = [sys.executable, HERE / "peers" / "flower_rounds.py", "--workload", "W1"]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [federation("W1", DPFedAvg(), setting("W1")) for _ in range(2)]
        simulated = FlowerSimulation(jobs[1].context, Path(folder))
        sides = {
            "inline": ours(jobs[0], Inline(jobs[0].context)),
            "fedveil in Flower's simulation": ours(jobs[1], simulated),  # type: ignore[arg-type]
            "plain Flower's simulation": program(plain),
        }
        found = together(sides, rounds)
    table = {side: {"seconds": s, "ratio": found.ratio(side, "inline")} for side, s in found.seconds.items()}
    for side in table:
        print(f"{side:>32} {table[side]['ratio']:.2f} of inline, {statistics.median(found.seconds[side]):.3f} s (median)")
    save("flower", {"turns": table})


# --- where a round goes -------------------------------------------------------------------------------------------------


@contextmanager
def timed(*functions: tuple[str, Any, str]) -> Iterator[dict[str, float]]:
    """Seconds in each function, by the name that is given for it, as long as the block lasts; (name, owner, attribute)."""
    spent: dict[str, float] = defaultdict(float)

    def timer(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                spent[name] += time.perf_counter() - begin

        return called

    with ExitStack() as stack:
        for name, owner, attribute in functions:
            stack.callback(setattr, owner, attribute, getattr(owner, attribute))
            setattr(owner, attribute, timer(name, getattr(owner, attribute)))
        yield spent


class Here:
    """An exchange with clients in this process; counts bytes both ways."""

    def __init__(self, context: Any, folder: Path) -> None:
        self.context, self.folder, self.down, self.up = context, folder, 0, 0

    def answers(self, messages: Mapping[int, tuple[bytes, ...]]) -> Mapping[int, bytes | str]:
        """Each client's."""
        own = replace(self.context, door=replace(self.context.door, ledger=NullLedger(), memory=None))
        found = {}
        for client, parts in messages.items():
            node = ClientNode(own, self.context.door.run, client, ClientStates(self.folder / str(client)), 2**62)
            found[client] = node.answer(*parts)
            self.down, self.up = self.down + sum(map(len, parts)), self.up + len(found[client])
        return found


def parts(rounds: int) -> None:
    """One process, ten clients one after the other."""
    torch.set_num_threads(1)
    job = federation("W1", DPFedAvg(), setting("W1", View.SERVER))
    with tempfile.TemporaryDirectory() as folder:
        exchange, progress = Here(job.context, Path(folder)), start(job)
        with GridEngine(job.context, job.context.door.run, exchange) as engine:
            one_round(job, engine, progress)
            exchange.down = exchange.up = 0
            begin = time.perf_counter()
            with timed(
                ("training and door", client_node, "client_round"),
                ("client reads the round", client_node, "read_round"),
                ("client packs its answer", client_node, "reply_bytes"),
                ("client's state to disk, synced", client_node.ClientStates, "keep"),
                ("client's states from disk", client_node.ClientStates, "before"),
                ("server reads answers", grid_engine, "read_reply"),
                ("server checks releases", GridEngine, "_outcome"),
            ) as spent:
                for _ in range(rounds):
                    one_round(job, engine, progress)
            whole = time.perf_counter() - begin
    table = {name: seconds / rounds for name, seconds in spent.items()} | {"whole round": whole / rounds}
    bytes_a_round = {"down": exchange.down / rounds, "up": exchange.up / rounds, "clients": 10, "dimension": 61706}
    for name, seconds in table.items():
        print(f"{name:>32} {seconds * 1000:8.1f} ms")
    save("flower", {"parts": table, "bytes": bytes_a_round})


# --- grids --------------------------------------------------------------------------------------------------------------


def digits(clients: int, rounds: int, bits: int | None = None, **run_section: Any) -> Config:
    """Small enough that fifty clients train on one machine."""
    return configure(
        method={"name": "dp-fedavg", "clip": 1.0},
        model={"name": "mlp", "hidden": [32]},
        data={"name": "digits", "partition": {"kind": "iid", "clients": clients}},
        training={"rounds": rounds, "clients_per_round": clients, "local_epochs": 2, "batch_size": 16, "optimizer": {"lr": 0.1}},
        privacy={"noise_multiplier": 0.2, "delta": 0.001, "view": "server", **({} if bits is None else {"grid_bits": bits})},
        run={"seeded_noise": True, "engine": "inline", **run_section},
    )


def norm_lost(exponent: int, clip: float, dimension: int) -> float:
    """Part of the norm that truncation takes of a random update as long as its clip."""
    update = torch.randn(dimension, generator=torch.Generator().manual_seed(1))
    integers = to_grid(update, [(slice(0, dimension), exponent)], clip)
    return 1 - float(np.linalg.norm(integers.astype(float))) * 2.0**exponent / clip


def grids() -> None:
    """LeNet-5 on the wire; the digits for accuracy, three seeds."""
    table: dict[str, Any] = {}
    for bits in GRIDS:
        job = federation("W1", DPFedAvg(), setting("W1", View.SERVER))
        door = replace(job.context.door, bits=bits)
        job = replace(job, context=replace(job.context, door=door))
        plan = job.context.policy.plan(None, {})  # type: ignore[arg-type]
        lost = norm_lost(exponent_for(plan.noise_std, bits), plan.clip, door.layout.dimension)  # type: ignore[union-attr, arg-type]
        with tempfile.TemporaryDirectory() as folder:
            exchange, progress = Here(job.context, Path(folder)), start(job)
            with GridEngine(job.context, job.context.door.run, exchange) as engine:
                one_round(job, engine, progress)
        scores = []
        for seed in range(3):
            with tempfile.TemporaryDirectory() as folder:
                scores.append(run(digits(10, 20, bits, seed=seed), Path(folder) / "run").history[-1]["test_accuracy"])
        small = norm_lost(exponent_for(0.2, bits), 1.0, 2410)
        table[str(bits)] = {"bytes": exchange.up / 10, "norm_lost": lost, "accuracy": scores, "norm_lost_digits": small}
        print(f"{bits} bits: {exchange.up / 10:.0f} bytes, {lost:.2%} of the norm lost ({small:.2%}), accuracy {scores}")
    save("flower", {"grids": table})


# --- deployment ---------------------------------------------------------------------------------------------------------


def memory() -> dict[str, list[float]]:
    """MB (PSS) of each process below this one, by what it is."""
    found: dict[str, list[float]] = defaultdict(list)
    for number, pid in enumerate(descendants(os.getpid())):
        with suppress(OSError, IndexError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            pss = held_bytes(pid) / 2**20
            name = "server" if not number else next((n for words, n in NAMES.items() if words in command), "other")
            found[name].append(round(pss, 1))
    return dict(found)


def deployment(nodes: list[int], rounds: int) -> None:
    """One network after the other, until one does not come up."""
    for clients in nodes:
        seen: list[dict[str, list[float]]] = []

        def look(row: Any, seen: list[dict[str, list[float]]] = seen) -> None:
            if row["round"] == 1:
                seen.append(memory())

        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            result = demo(digits(clients, rounds), Path(folder) / "run", print, look)
            inline = run(digits(clients, rounds), Path(folder) / "inline")
        seconds, own = ([row["seconds"] for row in r.history] for r in (result, inline))
        table = {
            "seconds": seconds,
            "inline": own,
            "participants": [row["participants"] for row in result.history],
            "whole": time.monotonic() - begin,
            "memory": {name: {"processes": len(mb), "MB": sum(mb)} for name, mb in seen[0].items()},
            "same_model": bool(result.model.vector.equal(inline.model.vector)),
        }
        print(clients, table)
        save("flower", {f"deployment {clients}": table})


def beside(nodes: list[int], rounds: int) -> None:
    """Networks of fedveil and of plain Flower in turns, twice each, over TLS; seconds of each side's rounds after its first."""
    for clients in nodes:
        seconds: dict[str, list[float]] = {"fedveil": [], "plain Flower": []}
        memories: list[dict[str, list[float]]] = []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                result = demo(digits(clients, rounds), Path(folder) / "run", print)
            assert [row["participants"] for row in result.history] == [clients] * rounds
            seconds["fedveil"] += [row["seconds"] for row in result.history][1:]
            rows = deployed(clients, rounds, lambda seen=memories: seen.append(memory()))  # type: ignore[misc]
            assert [row["answers"] for row in rows] == [clients] * rounds
            seconds["plain Flower"] += [row["seconds"] for row in rows][1:]
        kinds = {name for seen in memories for name in seen} - {"server"}
        most = {name: max(sum(seen.get(name, [])) for seen in memories) for name in kinds}
        table = {"seconds": seconds, "plain_memory": most}
        print(clients, table)
        save("flower", {f"TLS beside plain {clients}": table})


def draw() -> None:
    """Seconds a round and memory against the number of clients."""
    held = {int(k.split()[1]): v for k, v in loaded("flower")["table"].items() if k.startswith("deployment")}
    figure, counts = blank(7, 2.6), sorted(held)
    left, right = panels(figure, 2, 2)
    left.plot(counts, [statistics.median(held[n]["seconds"]) for n in counts], **style(0))
    left.set(xlabel="clients", ylabel="seconds a round (median)", ylim=(0, None))
    for i, name in enumerate(("client", "SuperNode", "SuperLink", "server")):
        right.plot(counts, [held[n]["memory"].get(name, {"MB": 0})["MB"] / 1024 for n in counts], label=name, **style(i))
    right.set(xlabel="clients", ylabel="GB in all (PSS)", ylim=(0, None))
    right.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        quiet(axis)
    save_figure(figure, FIGURES / "flower.svg")


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "turns": lambda asked: turns(asked.rounds),
    "parts": lambda asked: parts(asked.rounds),
    "grids": lambda asked: grids(),
    "deployment": lambda asked: deployment(asked.nodes, asked.rounds),
    "beside": lambda asked: beside([n for n in asked.nodes if n <= 10], asked.rounds),
    "draw": lambda asked: draw(),
}

if __name__ == "__main__":
    asked = arguments(__doc__, only=PARTS, rounds=5, nodes=[3, 10, 20, 50])
    for name in PARTS:
        if name in asked.only:
            PARTS[name](asked)
