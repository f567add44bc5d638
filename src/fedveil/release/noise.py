"""Randomness: noise and client sampling from the operating system's entropy, everything else from the seed.

Seeded noise is reproducible and therefore protects nobody; it is for simulation and tests, and the statement says so.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import mtrand

from fedveil.errors import ConfigError
from fedveil.ledger.entry import AGGREGATE
from fedveil.mechanism.plan import Plan
from fedveil.mechanism.sampler import fixed_sample, poisson_sample, rounded_normal
from fedveil.release.release_layout import ReleaseLayout
from fedveil.training.cores import available_cores

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor


_STEPS = 2.0**24
"""Grid steps in the noise std for noise in floats."""
_WORDS = slice(3, 3 + 624)
"""Position of the Mersenne twister's state in that of torch's CPU generator, in words of 64 bits."""
_ELSEWHERE = np.random.MT19937(0)
"""Substitute for numpy's global generator while draws must stay separate; numpy takes 70 us to copy a state and back."""


@dataclass(frozen=True)
class Randomness:
    """Sources of randomness of one run.

    Args:
        seed: seeds everything that need not be secret (initial model, batch order).
        seeded_noise: take noise and client sampling from the seed as well. Simulation only.
    """

    seed: int
    seeded_noise: bool = False

    def derive(self, *key: object) -> int:
        """Return a 63-bit seed for (seed, key); distinct keys give independent streams."""
        digest = hashlib.blake2b(repr((self.seed, *key)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def generator(self, *key: object) -> torch.Generator:
        """Return a torch generator for draws that need not be secret."""
        import torch

        return torch.Generator().manual_seed(self.derive(*key))

    @contextmanager
    def forward(self, device: torch.device, *key: object, secret: bool = False) -> Iterator[Callable[[], None]]:
        """Seed the global generators from which layers draw from the run's seed; restore their states afterwards.

        Yield a function that seeds them again, for passes that draw the same numbers.

        Args:
            secret: seed numpy's and Python's generators, from which a loss may draw under DP-SGD, from a secret key instead.
        """
        seed = self.derive("forward", *key)
        elsewhere = int.from_bytes(self.key("elsewhere", *key), "little") if secret else seed
        with _seeded(device, seed) as here, _seeded_elsewhere(elsewhere) as there:

            def seeded() -> None:
                here()
                there()

            yield seeded

    @contextmanager
    def layers(self, device: torch.device, *name: object, elsewhere: bool = False) -> Iterator[None]:
        """Seed torch's generators for one step of DP-SGD from a key as secret as its noise; restore their states afterwards.

        An example that leaves a batch shifts the numbers drawn for later ones, so an adversary who knew the numbers would see
        these change.

        Args:
            elsewhere: also seed numpy's and Python's global generators, from which no network draws under DP-SGD.
        """
        import torch

        key = self.key("layers", *name)
        seed = int.from_bytes(key[:8], "little") >> 1  # torch uses 32 bits of it on the CPU, so the whole state is set there
        with _seeded_elsewhere(int.from_bytes(key, "little")) if elsewhere else nullcontext(), _seeded(device, seed):
            words = np.frombuffer(hashlib.shake_256(key).digest(4 * _WORDS.stop), np.uint32)
            state = torch.get_rng_state()
            state.numpy().view(np.uint64)[_WORDS] = words[_WORDS]
            torch.set_rng_state(state)
            yield

    def key(self, *name: object) -> bytes:
        """Return a key of 32 bytes for one draw of noise: from the seed if `seeded_noise`, else fresh in each call."""
        if self.seeded_noise:
            return hashlib.blake2b(repr((self.seed, "noise", *name)).encode(), digest_size=32).digest()
        return os.urandom(32)

    def integers(self, std: float | NDArray[np.float64], n: int, *name: object, threads: int | None = None) -> NDArray[np.int64]:
        """Return integers [n] distributed as rounded Gaussian noise, std in grid steps; from the seed only if `seeded_noise`.

        Args:
            threads: at most this many are used; by default as many as torch may use. The bits do not depend on it.
        """
        return rounded_normal(std, n, self.key(*name), threads=threads)

    def normal(self, n: int, *name: object) -> Tensor:
        """Return standard normals [n], float32, for noise that promises nothing; from the seed only if `seeded_noise`."""
        import torch

        return torch.from_numpy(self.integers(_STEPS, n, *name)).to(torch.float32).mul_(1 / _STEPS)

    def coins(self, rate: float, n: int, *name: object) -> NDArray[np.int64]:
        """Return the members of a Poisson sample of 0 to n - 1, from a secret key, which amplification needs."""
        return poisson_sample(rate, n, self.key("coins", *name))

    def subset(self, size: int, n: int, *name: object) -> NDArray[np.int64]:
        """Return `size` of 0 to n - 1, drawn without replacement: from a secret key, or from the seed if `seeded_noise`."""
        if self.seeded_noise:
            return np.sort(np.random.default_rng(self.derive("sampling", *name)).choice(n, size=size, replace=False))
        return fixed_sample(size, n, self.key("subset", *name))


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[Callable[[], None]]:
    """Seed torch's generators for layers on this device, and restore their states afterwards; yield what seeds them."""
    import torch

    def seeded() -> None:
        if gpus:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        torch.default_generator.manual_seed(seed)

    gpus = [device] if device.type == "cuda" and torch.cuda.is_available() else []  # a simulated GPU has no generator
    with torch.random.fork_rng(devices=gpus):
        seeded()
        yield seeded


@contextmanager
def _seeded_elsewhere(seed: int) -> Iterator[Callable[[], None]]:
    """Seed the global generators of numpy and Python, and restore their states afterwards; yield what seeds them.

    User-defined code may draw from them, and one client's draws may not depend on how much another client drew.
    """
    before, numpys, numbers = random.getstate(), mtrand.get_bit_generator(), np.random.get_state(legacy=False)  # noqa: NPY002

    def seeded() -> None:
        random.seed(seed)
        np.random.seed([seed >> shift & 0xFFFFFFFF for shift in range(0, 256, 32)])  # noqa: NPY002

    mtrand.set_bit_generator(_ELSEWHERE)
    seeded()
    try:
        yield seeded
    finally:
        random.setstate(before)
        mtrand.set_bit_generator(numpys)
        np.random.set_state(numbers)  # noqa: NPY002 : these may nest, and a normal may be held back


_LEAST_SHARE = 4
"""Least noise std of a share, in grid steps, for which shares cost what one Gaussian does (docs/exact-release.md)."""
LARGE = 2**23
"""Coordinates from which the noise of a sum is drawn on all cores: no client trains while a sum is released."""


@dataclass(frozen=True)
class DrawnNoise:
    """Fresh noise [D] of a plan, in steps of its grid; one key for each release. name: (round, client).

    Its bits do not depend on the number of cores.
    """

    randomness: Randomness
    parts: ReleaseLayout
    plan: Plan
    name: tuple[int, int]

    def __call__(self) -> NDArray[np.int64]:
        parts, plan = self.parts, self.plan
        steps = [std * 2.0**-k for (_, std, _), (_, k) in zip(parts.groups(plan), parts.grid(plan), strict=True)]
        if plan.place == "upload" and min((s for s in steps if s), default=_LEAST_SHARE) < _LEAST_SHARE:
            raise ConfigError(
                f"an upload's noise has a std of {min(s for s in steps if s):.3g} grid steps, and noise that is added up over "
                f"uploads needs at least {_LEAST_SHARE}: give the mechanism (or privacy.grid_bits) at least 2 bits, or the plan "
                f"more noise"
            )
        if len(set(steps)) == 1 and plan.support is None:
            return self._integers(steps[0])
        sizes = [part.stop - part.start for part, _ in parts.grid(plan)]
        std = np.repeat(np.array(steps), sizes)
        if plan.support is not None:
            std[: parts.model.dimension] *= plan.support.numpy()
        return self._integers(std)

    def _integers(self, std: float | NDArray[np.float64]) -> NDArray[np.int64]:
        n = self.parts.dimension
        threads = available_cores() if self.name[1] == AGGREGATE and n >= LARGE else None
        return self.randomness.integers(std, n, *self.name, threads=threads)
