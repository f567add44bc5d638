"""What secure aggregation costs beside none, and beside the masks of Flower's SecAgg+: python benchmarks/masks.py

For n clients, d coordinates and a grid (privacy.grid_bits) at z = 1, on one thread and without a network, in processor time.
A client: its key, the checks of the set, key agreement with n - 1 others, masks and signature. Beside it none, which packs the
same integers as the wire format does, and the second stage of SecAgg+ with all n - 1 neighbours (quantisation, its own mask,
n - 1 pair masks), by the functions of the installed Flower. The server: n keys, and n vectors, checked and added up; beside it
none, which unpacks and adds. Sides take turns, medians of --rounds. Up to three clients mask; the server's time is that of
their vectors times n. Bytes are those of a client's messages.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedveil.deploy.wire_format import packed, unpacked
from fedveil.secure_aggregation.attempt_file import AttemptFile
from fedveil.secure_aggregation.coordinator import Coordinator
from fedveil.secure_aggregation.encoding import Terms
from fedveil.secure_aggregation.masks import Integers, needed_bits
from fedveil.secure_aggregation.member import Member
from fedveil.secure_aggregation.roster import Roster, RosterClient
from harness import arguments, fill, kept

MASKING, ATTEMPTS, PEERS = 3, 55, 10**6
"""Clients that mask; attempts of a run of 50 rounds; most coordinates with which SecAgg+ is timed."""


class Given:
    """A release that is there already, and plans that allow any sum."""

    def __init__(self, vector: Integers) -> None:
        self.vector = vector

    def plan(self, members: int) -> bytes:
        return bytes(32)

    def train(self) -> None:
        pass

    def noisy(self, members: int) -> Integers:
        return self.vector

    def plausible(self, total: Integers, members: int) -> bool:
        return True


def timed(act: Callable[..., Any], *given: Any) -> tuple[float, Any]:
    """Milliseconds of this process's processor time, and what came of it."""
    begin = time.process_time()
    found = act(*given)
    return 1000 * (time.process_time() - begin), found


def case(n: int, d: int, grid: int, rounds: int) -> dict[str, Any]:
    """Medians of one case, in milliseconds a client and a server; bytes of a client."""
    step = 2.0 ** (grid + 1)  # most steps in a noise std of a share, which is clip / sqrt(n - 1)
    bits = needed_bits(math.sqrt(n - 1) * step, step, n, ATTEMPTS * d)
    largest = int(step * (math.sqrt(n - 1) + 14))  # of an integer without masks, as the wire format bounds it
    keys = {client: Ed25519PrivateKey.generate() for client in range(n)}
    roster = Roster(tuple(RosterClient(c, f"client {c}", key.public_key().public_bytes_raw()) for c, key in keys.items()))
    terms = Terms("benchmark", bytes(32), roster, n, 1, 2**31, bits, d)
    vector = np.random.default_rng(0).integers(-largest, largest + 1, d)
    release, bounds = Given(vector), [(d, largest)]
    members = {client: Member(client, key, terms, AttemptFile()) for client, key in keys.items()}
    coordinator, masking = Coordinator(terms, AttemptFile()), min(n, MASKING)
    times: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}

    def note(side: str, ms: float) -> None:
        times.setdefault(side, []).append(ms)

    for number in range(rounds):
        told = number.to_bytes(8, "little")
        coordinator.begin(number, told, release)
        ready = {client: timed(member.ready, number, told, release) for client, member in members.items()}
        keys_ms = sum(timed(coordinator.ready, client, answer)[0] for client, (_, answer) in ready.items())
        request = coordinator.name_set()
        assert request is not None
        masks_ms, adding_ms = [], []
        for client in range(masking):
            ms, answer = timed(members[client].masked, request)
            masks_ms.append(ms + ready[client][0])
            adding_ms.append(timed(coordinator.masked, client, answer)[0])
        note("client", statistics.median(masks_ms))
        note("server", keys_ms + n * statistics.median(adding_ms))
        ms, content = timed(packed, vector, bounds)
        note("client without masks", ms)
        total = np.zeros(d, np.int64)
        ms, _ = timed(lambda content, total: np.add(total, unpacked(content, d)[0], out=total), content, total)
        note("server without masks", n * ms)
        if d <= PEERS and (beside := secagg(n, d)) is not None:
            note("client in SecAgg+", beside)
        sizes = {
            "bits": bits,
            "up": len(ready[0][1]) + len(answer),
            "up without masks": len(content),
            "down beside the model": len(request),
        }
    return {side: round(statistics.median(values), 2) for side, values in times.items()} | sizes


def secagg(n: int, d: int) -> float | None:
    """Milliseconds of the second stage of Flower's SecAgg+ at one client with n - 1 neighbours; None without Flower."""
    try:
        from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
        from flwr.common.secure_aggregation.quantization import quantize
        from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
        from flwr.supercore.primitives.asymmetric import generate_key_pairs
    except ImportError:
        return None
    own, _ = generate_key_pairs()
    others = [generate_key_pairs()[1] for _ in range(n - 1)]
    update = [np.random.default_rng(1).normal(size=d)]

    def masked() -> Any:
        (total,) = quantize(update, 8.0, 2**22)
        total = total + pseudo_rand_gen(bytes(32), 2**32, [(d,)])[0]
        for other in others:
            (mask,) = pseudo_rand_gen(generate_shared_key(own, other), 2**32, [(d,)])
            total = total + mask
        return total % 2**32

    return timed(masked)[0]


if __name__ == "__main__":
    asked = arguments(__doc__, clients=[3, 10, 20, 50], dimensions=[61_706, 1_000_000, 11_000_000], grids=[24, 16], rounds=5)
    torch.set_num_threads(1)
    cases = {
        (str(grid), str(d), str(n)): (case, n, d, grid, asked.rounds)
        for grid in asked.grids
        for d in asked.dimensions
        for n in asked.clients
    }
    fill("masks", kept("masks"), cases)
