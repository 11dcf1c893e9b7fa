"""Whether a classifier is told apart from one that always gives the same answer."""

from __future__ import annotations

import math

from scipy import stats

from flsv.games.evaluation.scores import Scores

#: How often a model that has learnt nothing is taken for one that has, at most (about, for balanced accuracy).
LEVEL = 0.05


def told_apart(scores: Scores, performance: str) -> bool:
    r"""Whether one model's score on the validation set is above what chance leaves to a constant answer.

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
        >>> constant = Scores(torch.tensor([[94, 0]]), torch.tensor([94, 6]), torch.tensor([0.3]))
        >>> told_apart(constant, "accuracy"), told_apart(constant, "balanced_accuracy")
        (False, False)
        >>> learnt = Scores(torch.tensor([[92, 5]]), torch.tensor([94, 6]), torch.tensor([0.1]))
        >>> [told_apart(learnt, by) for by in ("accuracy", "balanced_accuracy", "negative_loss")]
        [False, True, True]
    """
    there = scores.support > 0
    support, correct = scores.support[there].double(), scores.correct[0, there].double()
    if performance == "accuracy":
        most = int(support.argmax())
        won = int(correct.sum() - correct[most])
        lost = int(support[most] - correct[most])
        return won + lost > 0 and float(stats.binom.sf(won - 1, won + lost, 0.5)) < LEVEL
    if performance == "negative_loss":
        shares = support / support.sum()
        entropy = float(-(shares * shares.log()).sum())
        return float(support.sum()) * (entropy - float(scores.loss[0])) > math.log(1 / LEVEL)
    recall = (correct + 1) / (support + 2)
    error = float((recall * (1 - recall) / support).sum().sqrt()) / len(support)
    return float((correct / support).mean()) - 1 / len(support) > float(stats.norm.ppf(1 - LEVEL)) * error
