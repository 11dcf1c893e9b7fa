"""What every source of data is brought to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from flsv.data.splits import FederatedSplits


@dataclass(frozen=True)
class SourceData:
    """What a source has to offer.

    Args:
        train: the training data, map-style.
        val: the source's own validation data, or None.
        val_loaders: a loader, or several, to validate with as they are, where ``val`` would not do them justice.
        test: test data, or None.
        indices: which samples of ``train`` may be used, int64 ``[n]``; None for all.
        class_names: names of the classes, empty where the source has none.
        train_options: ``batch_size`` and what else a ``DataLoader`` is told, as far as the source says.
        eval_options: the same for evaluation.
        groups: number of each training sample's group, int64 ``[N]``, where the source itself says what they are.
        group_names: their names, by number.
        clients: whether these groups are the clients that somebody gave: none may be lost, none dealt anew.
        pooled: whether inputs were made with numbers of all training samples, such as their means.
        fitted: the same data with inputs that could not be made before it was known who trains on which sample; None
            where the inputs are there.
    """

    train: Dataset
    val: Dataset | None = None
    val_loaders: Iterable[Any] | None = None
    test: Dataset | None = None
    indices: Tensor | None = None
    class_names: tuple[str, ...] = ()
    train_options: dict[str, Any] = field(default_factory=dict)
    eval_options: dict[str, Any] = field(default_factory=dict)
    groups: Tensor | None = None
    group_names: tuple[str, ...] = ()
    clients: bool = False
    pooled: bool = False
    fitted: Callable[[FederatedSplits], SourceData] | None = None
