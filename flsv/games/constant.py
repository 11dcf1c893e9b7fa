"""Tests whether a classifier differs from one that always gives the same answer.

A model's outputs on the validation set, for runs whose metrics evaluate no models, or not by classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import lightning as L
import torch
from scipy import stats
from torch import Tensor

from flsv._lightning.evaluation import each_loader, on_device
from flsv.errors import ConfigurationError
from flsv.games.replica import Replica, rows_of
from flsv.games.scores import Scores, checked_logits, checked_pair
from flsv.parameters import ParameterSpace
from flsv.seeding import isolated_rngs

#: How often a model that has learnt nothing is taken for one that has, at most (about, for balanced accuracy).
LEVEL = 0.05


def told_apart(scores: Scores, performance: str) -> bool:
    r"""Whether a model's score on the validation set is significantly above a constant answer's.

    Args:
        scores: of one model, K = 1.
        performance: ``"accuracy"``: against the majority class, by the exact McNemar test on the samples on which the
            two differ. ``"negative_loss"``: against the classes' shares on the set, the best constant there is. Of
            predictions that have nothing to do with the labels, the likelihood ratio has a mean of 1 at most, so that
            it is above :math:`1/\alpha` with probability :math:`\alpha` at most (Markov's inequality).
            ``"balanced_accuracy"``, ``"per_class_accuracy"``: against 1 / M over the classes that occur, by the
            normal interval of the mean recall, with one sample right and one wrong added to every class.

    Example:
        >>> import torch
        >>> def scores(correct, support, loss):
        ...     return Scores({"correct": torch.tensor([correct]), "loss": torch.tensor([loss])}, torch.tensor(support))
        >>> constant, learned = scores([94, 0], [94, 6], 0.3), scores([92, 5], [94, 6], 0.1)
        >>> told_apart(constant, "accuracy"), told_apart(constant, "balanced_accuracy")
        (False, False)
        >>> [told_apart(learned, by) for by in ("accuracy", "balanced_accuracy", "negative_loss")]
        [False, True, True]
    """
    assert scores.support is not None
    there = scores.support > 0
    support, correct = scores.support[there].double(), scores.values["correct"][0, there].double()
    if performance == "accuracy":
        most = int(support.argmax())
        won = int(correct.sum() - correct[most])
        lost = int(support[most] - correct[most])
        return won + lost > 0 and float(stats.binom.sf(won - 1, won + lost, 0.5)) < LEVEL
    if performance == "negative_loss":
        shares = support / support.sum()
        entropy = float(-(shares * shares.log()).sum())
        return float(support.sum()) * (entropy - float(scores.values["loss"][0])) > math.log(1 / LEVEL)
    recall = (correct + 1) / (support + 2)
    error = float((recall * (1 - recall) / support).sum().sqrt()) / len(support)
    return float((correct / support).mean()) - 1 / len(support) > float(stats.norm.ppf(1 - LEVEL)) * error


def ranked_apart(outputs: Tensor, labels: Tensor) -> bool:
    """Whether a class's samples are ranked above the others' by more than chance: area under the ROC curve above 0.5,
    by the one-sided Mann-Whitney test; with several classes each against the rest at ``LEVEL`` / M (Bonferroni).

    Args:
        outputs: ``[N, M]`` logits; or of two classes what grows with class 1's probability, ``[N]``.
        labels: ``[N]``.

    Example:
        >>> import torch
        >>> y = torch.tensor([0, 1] * 10)
        >>> ranked_apart(y - 5.0, y), ranked_apart(torch.zeros(20, 2), y)
        (True, False)
    """
    columns = {1: outputs} if outputs.ndim == 1 else dict(enumerate(outputs.double().softmax(1).T))
    if len(columns) == 2:
        del columns[0]  # class 1's, mirrored
    parts = [(column[labels == c], column[labels != c]) for c, column in columns.items()]
    parts = [(own, rest) for own, rest in parts if len(own) and len(rest)]
    tests = [stats.mannwhitneyu(own.numpy(), rest.numpy(), alternative="greater").pvalue for own, rest in parts]
    return any(p < LEVEL / len(tests) for p in tests)


@torch.inference_mode(False)
@torch.no_grad()
def answers_of(
    trainer: L.Trainer, space: ParameterSpace, vector: Tensor, loaders: Any, num_classes: int
) -> tuple[Tensor, Tensor]:
    """What a copy of the trainer's module with ``vector [P]`` in it gives for the validation samples, of as many
    batches as the trainer validates on. One batch at a time is in memory; nothing of the fit changes.

    Args:
        trainer: of the fit, with its module on its device.
        space: the map between the module and vectors.
        vector: the model.
        loaders: one or several validation loaders of pairs ``(x, y)``.
        num_classes: M.

    Returns:
        Logits ``[N, M]``, or of two classes what stands for class 1 ``[N]``, where ``forward`` gives one number per
        sample; and labels ``[N]``; on the CPU.

    Raises:
        ConfigurationError: batches that are no pairs, labels that are no classes, outputs that are no classes'.
    """
    module, outputs, labels = trainer.lightning_module, [], []
    with isolated_rngs(0, "answers"), torch.autocast(trainer.strategy.root_device.type, enabled=False):
        replica = Replica(module, space, trainer.strategy.precision_plugin.forward_context)
        replica.follow(module)
        replica.load(rows_of(vector[None]), 0)
        for index, loader in enumerate(each_loader(loaders)):
            for batch in on_device(trainer, _limited(loader, trainer.limit_val_batches), index):
                x, y = checked_pair(batch, num_classes)
                with replica.context():
                    found = replica.module(x)
                one = isinstance(found, Tensor) and num_classes == 2 and found.shape in ((len(y),), (len(y), 1))
                found = found.reshape(-1) if one else checked_logits(found, y, num_classes)
                outputs.append(found.float().cpu())
                labels.append(y.cpu())
    if not labels:
        raise ConfigurationError("there are no validation samples.")
    return torch.cat(outputs), torch.cat(labels)


def _limited(loader: Iterable[Any], limit: int | float) -> Iterator[Any]:
    if isinstance(limit, float):
        return iter(loader) if limit == 1 else islice(loader, math.floor(limit * len(loader)))  # type: ignore[arg-type]
    return islice(loader, limit)
