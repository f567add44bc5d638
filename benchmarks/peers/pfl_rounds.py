"""Rounds of pfl's federated averaging in two processes: `python pfl_rounds.py --workload W1` starts torchrun with itself."""

from __future__ import annotations

import os
import sys

import torch
import torch.nn.functional as F

from common import Turn, chosen, examples, new_model


def main() -> None:
    """Take turns; the first process reads and writes, the other follows."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.internal.ops import pytorch_ops
    from pfl.internal.ops.selector import set_framework_module
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    work = chosen()
    torch.set_num_threads(1)
    set_framework_module(pytorch_ops)

    class Module(torch.nn.Module):
        """A network that knows its loss."""

        def __init__(self) -> None:
            super().__init__()
            self.network = new_model(work)

        def loss(self, x, y, is_eval=False):  # type: ignore[no-untyped-def]
            """Cross-entropy."""
            return F.cross_entropy(self.network(x), y)

        def metrics(self, x, y, is_eval=True):  # type: ignore[no-untyped-def]
            """None."""
            return {}

    class Turns(TrainingProcessCallback):
        """After each round."""

        def __init__(self) -> None:
            self.turn = Turn()

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
            """Whether to stop, for both processes."""
            stop = torch.zeros(1)
            if torch.distributed.get_rank() == 0:
                stop.fill_(not self.turn())
            torch.distributed.broadcast(stop, 0)
            return bool(stop.item()), Metrics()

    module = Module()
    central = torch.optim.SGD(module.parameters(), lr=1.0)
    model = PyTorchModel(module, torch.optim.SGD, central)
    users = {i: list(examples(work, i)) for i in range(work.clients)}
    data = FederatedDataset.from_slices(users, get_user_sampler("minimize_reuse", list(users)))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**9, evaluation_frequency=10**9, train_cohort_size=work.clients, val_cohort_size=0
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(local_num_epochs=work.epochs, local_learning_rate=work.lr, local_batch_size=work.batch),
        None,
        [Turns()],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        main()
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", *sys.argv]
        os.execv(sys.executable, command)
