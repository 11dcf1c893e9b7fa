"""Label noise: closed-set (other classes of the task) and open-set (images of unknown classes).

Sun et al., "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023, appendix B.3. "Malicious clients
with closed-set label noise": the label of each training sample of a malicious client is flipped from L to (L + 1) mod
C. A share of the samples instead of all is FedBary's "noisy labels" (0, 5, 10, 15 and 20 % by client). "Irrelevant
data with open-set label noise", after Nagalapatti and Narayanam (S-FedAvg, AAAI 2021) and Wang et al. (CVPR 2018):
labels of known categories are assigned to data of unknown categories, to half of the training images. As in the
authors' code, the unknown categories are classes of the data set itself: five of ten are half of the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from flsv.data.corruption.base import Corruption, some
from flsv.data.groups import client_called
from flsv.data.labels import dataset_labels
from flsv.data.splits import FederatedSplits
from flsv.errors import ConfigurationError


class ClosedSetLabelNoise(Corruption):
    """Labels flipped to other classes of the task: ``y -> (y + 1) mod C``, or a class at random.

    Which samples were flipped, :meth:`flsv.data.FederatedDataModule.corrupted_samples` tells; the flip never keeps the
    label.

    Args:
        rate: share of each client's samples that are flipped, to the nearest whole number of samples.
        to: ``"next"`` as in ShapleyFL, or ``"random"``: every other class equally likely.
        clients: whom it concerns, see :class:`~flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients and of the flips.

    Raises:
        ConfigurationError: a rate outside [0, 1], or another ``to``; at the call, fewer than 2 classes.

    Example:
        >>> x, y = torch.zeros(4, 2), torch.tensor([0, 1, 2, 2])
        >>> ClosedSetLabelNoise()(x, y, num_classes=3, generator=torch.Generator())[1]
        tensor([1, 2, 0, 0])
    """

    def __init__(
        self,
        rate: float = 1.0,
        to: Literal["next", "random"] = "next",
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.rate = rate
        self.to = to
        self._check_rate("rate")
        if to not in ("next", "random"):
            raise ConfigurationError(f"{self!r}: to must be 'next' or 'random'.")

    def corrupt(self, x: Tensor, y: Tensor, num_classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if num_classes < 2:
            raise ConfigurationError(f"{self!r}: with {num_classes} class there is no other label to give.")
        flipped = some(len(y), self.rate, generator)
        step: int | Tensor = 1
        if self.to == "random":
            step = torch.randint(1, num_classes, flipped.shape, generator=generator)
        y[flipped] = (y[flipped] + step) % num_classes
        return x, y


class OpenSetLabelNoise(Corruption):
    """Declares some classes unknown to the task; the clients concerned train on their images under known labels.

    Unknown classes are not part of the task, so nobody else has their samples: neither the other clients nor any
    validation or test set. ``num_classes`` stays what it is; the unknown classes' outputs are never trained.

    Args:
        unknown_classes: the classes in question; at least one other must be left.
        to: the label that an image of an unknown class gets: ``"next"``, the next known class (cyclically; as in the
            authors' code, which makes every even class the odd one after it), or ``"random"``, any known class.
        clients: whom it concerns, see :class:`~flsv.data.ClientChoice`; by default all clients, as in the paper's code.
        fraction: likewise.
        seed: seed of the choice of clients and of random labels.

    Raises:
        ConfigurationError: no unknown class; at the call, no known one, or classes that do not exist.

    Example:
        >>> x, y = torch.zeros(5, 2), torch.tensor([0, 1, 2, 3, 2])
        >>> OpenSetLabelNoise([0, 2])(x, y, num_classes=4, generator=torch.Generator())[1]
        tensor([1, 1, 3, 3, 3])
    """

    def __init__(
        self,
        unknown_classes: list[int],
        to: Literal["next", "random"] = "next",
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(clients, fraction, seed)
        self.unknown_classes = sorted({*unknown_classes})
        self.to = to
        if not self.unknown_classes or self.unknown_classes[0] < 0:
            raise ConfigurationError(f"{self!r}: unknown_classes needs class numbers from 0 up, at least one.")
        if to not in ("next", "random"):
            raise ConfigurationError(f"{self!r}: to must be 'next' or 'random'.")

    def corrupt(self, x: Tensor, y: Tensor, num_classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        known = torch.tensor([label for label in range(num_classes) if label not in self.unknown_classes])
        if self.unknown_classes[-1] >= num_classes or len(known) == 0:
            raise ConfigurationError(
                f"{self!r}: the data have the classes 0 .. {num_classes - 1}, and at least one of them must stay known."
            )
        irrelevant = torch.isin(y, torch.tensor(self.unknown_classes)).nonzero().flatten()
        if self.to == "next":
            place = torch.searchsorted(known, y[irrelevant]) % len(known)
        else:
            place = torch.randint(len(known), irrelevant.shape, generator=generator)
        y[irrelevant] = known[place]
        return x, y


def leave_out_unknown(splits: FederatedSplits, labels: Tensor, corruptions: Sequence[Corruption]) -> FederatedSplits:
    """The splits without the samples of unknown classes, but for the training sets of the clients concerned.

    Args:
        splits: who has what.
        labels: true class of every sample, int64 ``[N]``.
        corruptions: all that there are; those without ``unknown_classes`` do not matter.

    Raises:
        ConfigurationError: a client or the server's validation set is left with nothing.
    """
    unknown = unknown_classes(corruptions)
    if not unknown:
        return splits
    count = len(splits.clients)
    concerned = {client for each in corruptions if each.unknown_classes for client in each.chosen(count)}
    known = ~torch.isin(labels, torch.tensor(unknown))

    # An irrelevant client's own validation and test sets may well come out empty; who needs them, asks for them.
    clients = tuple(
        {
            name: samples if name == "train" and client in concerned else samples[known[samples]]
            for name, samples in sets.items()
        }
        for client, sets in enumerate(splits.clients)
    )
    left = replace(splits, server_val=splits.server_val[known[splits.server_val]], clients=clients)
    empty = [client_called(client, splits.names) for client, sets in enumerate(left.clients) if not len(sets["train"])]
    empty += ["the server's validation set"] if len(splits.server_val) and not len(left.server_val) else []
    if empty:
        raise ConfigurationError(
            f"Without the classes {unknown}, which the task does not know, {empty[0]} has no samples. Choose another "
            f"partition or other unknown_classes (the clients that OpenSetLabelNoise concerns keep their samples)."
        )
    return left


def unknown_classes(corruptions: Sequence[Corruption]) -> list[int]:
    """The classes that any of the corruptions declares unknown."""
    return sorted({label for corruption in corruptions for label in corruption.unknown_classes})


def known_samples(dataset: Dataset, unknown: list[int]) -> Dataset:
    """The data set, without the samples of ``unknown`` classes if there are any such classes."""
    if not unknown:
        return dataset
    return Subset(dataset, (~torch.isin(dataset_labels(dataset), torch.tensor(unknown))).nonzero().flatten().tolist())
