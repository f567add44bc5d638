"""One class for each example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from fedveil.data.catalogue import Info
from fedveil.tasks.column import ACCURACY, Column
from fedveil.tasks.task import Task, Weight, need_classes, need_weights, weights_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class Classification(Task):
    """One of several classes: cross-entropy of logits [n, classes].

    class_weights: factor of the loss of each class, public: not computed from private data. The loss of a batch is the plain
    mean.
    """

    metrics: ClassVar = (
        ACCURACY,
        Column("precision", "Precision", "macro mean", "higher", share=True),
        Column("recall", "Recall (balanced accuracy)", "macro mean", "higher", share=True),
        Column("f1", "F1 score", "macro mean", "higher", share=True),
        Column("auc", "Area under the ROC curve", "AUC, macro mean", "higher", share=True),
        Column("majority", "Accuracy of always the commonest class", "accuracy", share=True),
    )
    loss_unit: ClassVar = "cross-entropy"
    output_form: ClassVar = "[n, C], a score for each class"
    trivial_answer: ClassVar = "always the commonest class"

    name: Literal["classification"] = "classification"
    class_weights: tuple[Weight, ...] | None = None

    def check(self, info: Info) -> None:
        """One class an example, and a weight for each class where there are any."""
        need_classes(self.name, info)
        need_weights("class_weights", self.class_weights, info, "classes", info.classes)

    @property
    def largest_weight(self) -> float:
        """That of all classes."""
        return max(self.class_weights or (1.0,))

    def example_weights(self, target: Tensor) -> Tensor | None:
        """Return the weight of each example's class."""
        return None if self.class_weights is None else weights_of(self.class_weights, target)[target]

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy, times the weight of the class."""
        from torch.nn import functional as F

        each = F.cross_entropy(output, target, reduction="none")
        return each if self.class_weights is None else each * output.new_tensor(self.class_weights)[target]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean."""
        from torch.nn import functional as F

        return F.cross_entropy(output, target) if self.class_weights is None else super().loss(output, target)

    def predictions(self, output: Tensor) -> Tensor:
        """Return the number of the most likely class."""
        return output.argmax(1)

    def scores(self, *evidence: Tensor) -> Mapping[str, float]:
        """Macro figures are plain means over the classes that occur; a class never predicted has precision 0."""
        from fedveil.tasks.scores import class_scores, macro_auc

        output, target = evidence
        return {**class_scores(output.argmax(1), target, output.shape[1]), "auc": macro_auc(output.softmax(1), target)}

    def trivial(self, target: Tensor) -> float:
        """Return the accuracy of always the commonest class."""
        return float(target.bincount().max()) / len(target)

    def client_scores(self, offsets: NDArray[np.int64], *evidence: Tensor) -> list[float | None]:
        """Accuracy by client."""
        from fedveil.tasks.scores import means_by_client

        output, target = evidence
        return means_by_client((output.argmax(1) == target).double(), offsets)
