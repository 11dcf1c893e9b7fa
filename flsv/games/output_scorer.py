"""OutputScorer: scores many models by their outputs for all validation samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.games.classification import SortedLabels
from flsv.games.output_form import OutputForm
from flsv.games.output_metric import OutputMetric
from flsv.games.vector_evaluator import Scores

#: The largest relative difference between a metric of batches and of all samples at once that is rounding.
METRIC_ROUNDING = 1e-4


class OutputScorer:
    """Scoring of models by their outputs for V validation samples.

    Args:
        form: the form of the outputs.
        labels: the labels of each validation batch.
        support: for classifiers, the number of samples of each class, int64 ``[M]``.
        metric: a metric of outputs and labels.

    Attributes:
        labels: the labels of all samples, on the CPU, ``[V, ...]``.
        sorted_labels: those of a classifier. None without ``support``.
        order: int64 ``[V]``, the order in which :meth:`score` takes samples. None: that of the batches.
    """

    sorted_labels: SortedLabels | None = None
    order: Tensor | None = None
    _metric: OutputMetric | None = None
    # Whether the metric depends on the batches. None: not known yet.
    _depends_on_batches: bool | None = None

    def __init__(
        self,
        form: OutputForm,
        labels: Sequence[Tensor],
        support: Tensor | None = None,
        metric: OutputMetric | None = None,
    ) -> None:
        self.form = form
        self.labels = torch.cat([batch_labels.cpu() for batch_labels in labels])
        self._support = support
        if support is not None:
            self.sorted_labels = SortedLabels(self.labels, len(support))
            self.order = self.sorted_labels.order
        self._batch_sizes = [len(batch_labels) for batch_labels in labels]
        if metric is not None:
            self._metric = metric.clone(torch.device("cpu"))

    @torch.no_grad()
    def score(self, outputs: Tensor, losses: bool = True) -> Scores:
        """Compute the scores of c models, as :class:`flsv.games.ModelEvaluator` does.

        Args:
            outputs: ``[c, V, ...]``, in the form :attr:`form` and the order :attr:`order`.
            losses: whether a classifier's loss is needed, which is 0 otherwise.
        """
        values: dict[str, Tensor] = {}
        if self.sorted_labels is not None:
            logits = self.form.outputs(outputs)
            values["correct"] = self.sorted_labels.counts(logits)
            values["loss"] = torch.zeros(len(outputs), dtype=torch.float64)
            if losses:
                values["loss"] = self.sorted_labels.losses(logits).double().mean(1)
        if self._metric is not None:
            metrics = [self._metric_of_model(model_outputs) for model_outputs in outputs]
            values["metric"] = torch.tensor(metrics, dtype=torch.float64)
        return Scores(values, self._support)

    def _metric_of_model(self, outputs: Tensor) -> float:
        """Compute the metric as :class:`flsv.games.ModelEvaluator` does, by one update if batches change nothing."""
        labels = self.labels if self.order is None else self.labels[self.order]
        at_once = self.metric(outputs, labels)
        if self._depends_on_batches is False:
            return at_once
        by_batch = self.metric(outputs, labels, self._batch_sizes)
        if self._depends_on_batches is None:
            is_same = math.isclose(by_batch, at_once, rel_tol=METRIC_ROUNDING)
            self._depends_on_batches = not is_same
        return by_batch

    def metric(
        self, outputs: Tensor, labels: Tensor, batch_sizes: list[int] | None = None
    ) -> float:
        """Compute the metric of one model's ``outputs [V, ...]`` for V labels, by batches of these sizes, or at
        once.
        """
        assert self._metric is not None
        self._metric.metric.reset()
        sizes = batch_sizes or [len(labels)]
        for batch_outputs, batch_labels in zip(outputs.split(sizes), labels.split(sizes)):
            self._metric.update(self.form.outputs(batch_outputs[None])[0], batch_labels)
        return self._metric.compute()
