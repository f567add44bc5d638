"""A run's fixed parts (`Federation`) and its changing state (`Progress`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from fedveil.federation.shared_sums import SimulatedMasks
from fedveil.methods.run_cost import is_sum_equivalent
from fedveil.training.local import State
from fedveil.training.optimizer import OptimizerSpec

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.federation.clients import Clients
    from fedveil.federation.history import Record
    from fedveil.federation.round import Context
    from fedveil.mechanism.mechanisms import Participation
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting
    from fedveil.release.noise import Randomness


@dataclass
class Progress:
    """State that a run needs to be resumed; plain, so that it can be checkpointed.

    Args:
        round: the next round. model, previous: global models [d]. common: state of the common policy (aggregate view).
        policies, privates: states per client, created when first needed.
        average: of the models, if the run releases an average. served: state of the method's server.
        seen, last: number of rounds that each client took part in, and the last of them. spent: clients whose caps are spent.
    """

    round: int
    model: Tensor
    previous: Tensor | None = None
    buffers: Tensor | None = None
    common: State = field(default_factory=dict)
    policies: dict[int, State] = field(default_factory=dict)
    privates: dict[int, State] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    spent: set[int] = field(default_factory=set)
    server: State = field(default_factory=dict)
    average: State = field(default_factory=dict)
    served: State = field(default_factory=dict)
    history: list[Record] = field(default_factory=list)


@dataclass(frozen=True)
class Federation:
    """Parts that stay the same over a run.

    Args:
        test: public test examples and labels; server: optimiser that applies the aggregated step.
        draws: randomness for training on `public`: from the run's seed, even if an attack uses another one elsewhere.
        client_tests: each client's test examples, or None. evaluate_every: rounds between evaluations.
        personal_on_test_set: whether personal models are also scored on all of `test`.
        public: examples and labels that belong to no client, for policies that use the loss on them or train on them.
        masks: secure aggregation in this process, or None.
        participation: rule that correlated noise assumes and the sampler enforces.
    """

    setting: Setting
    method: Method
    context: Context
    test: tuple[Tensor, Tensor]
    draws: Randomness
    client_tests: Clients | None = None
    server: OptimizerSpec = field(default_factory=lambda: OptimizerSpec(lr=1.0))
    evaluate_every: int = 1
    public: tuple[Tensor, Tensor] | None = None
    participation: Participation | None = None
    personal_on_test_set: bool = False
    masks: SimulatedMasks | None = None

    @cached_property
    def is_sum_equivalent(self) -> bool:
        """Return whether the clients' uploads add up to one sum (see `fedveil.methods.run_cost.is_sum_equivalent`)."""
        return is_sum_equivalent(self.method, self.setting)


def start(federation: Federation) -> Progress:
    """Return the progress before the first round, from the context's freshly initialised model."""
    return Progress(0, federation.context.model.vector.to("cpu", copy=True))
