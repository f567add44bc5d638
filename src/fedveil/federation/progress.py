"""What stays the same over a run, and what a run needs to go on from where it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from fedveil.methods.run_cost import adds_up
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
    """Everything that a run needs to go on from where it is; plain, so that it checkpoints.

    Args:
        round: the next round. model, previous: global models [d]. common: state of the common policy (aggregate view).
        policies, privates: states per client, created when first needed.
        average: of the models, where the run hands an average over. served: state of the method's server.
        seen, last: how many rounds each client took part in, and the last of them. spent: clients whose caps are spent.
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
    """What stays the same over a run.

    Args:
        test: public test examples and labels; server: the server's optimiser on the aggregated step.
        draws: what is random when the server trains on `public`: of the run's own seed, also where an attack has another one.
        client_tests: each client's own test examples, or None. evaluate_every: rounds between evaluations.
        personal_on_test_set: the clients' own models are measured on all of `test`, too.
        public: examples and labels that belong to no client, for policies that look at the loss or at training on them.
        participation: what correlated noise assumes of who takes part, and the sampler enforces.
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

    @cached_property
    def adds_up(self) -> bool:
        """See `fedveil.methods.run_cost.adds_up`."""
        return adds_up(self.method, self.setting)


def start(federation: Federation) -> Progress:
    """The progress before the first round, from the context's freshly initialised model."""
    return Progress(0, federation.context.model.vector.to("cpu", copy=True))
