"""Splits of the samples: the server's validation set, and every client's training, validation and test set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from annotated_types import Ge, Lt
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv.data.groups import client_called
from flsv.data.partition import Partitioner, shuffled
from flsv.utilities.declared import Count, Rules, checked
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.seeding import generator_for
from flsv.valuation import FedBary

#: Share of a number of samples, in [0, 1).
Part = Annotated[float, Ge(0), Lt(1), "0.1 is 10 %."]


@checked
@dataclass(frozen=True)
class Splits:
    """Shares of the samples that are set aside as validation and test sets, or left out.

    Args:
        server_val: share of the training data that becomes the server's validation set, before the rest is partitioned;
            0: no validation set. Without effect if the source has its own validation data.
        client_val: share of each client's samples for that client's validation set; at least one sample unless 0.
        client_test: share of each client's samples for that client's test set; at least one sample unless 0.
        max_samples: size of the random subset of the training samples that is used, including the server's validation
            set; None: all samples.
        drop_flagged: whether to leave out the training samples that clients flag as harmful. The clients value their
            samples by :class:`flsv.valuation.FedBary`: against the server's validation set or, without one, against
            each other. True takes that class's defaults; an instance sets its options.
        seed: seed of all splits except the partition, whose seed is the partitioner's; None: the seed of
            ``seed_everything``.

    Raises:
        ConfigurationError: a share lies outside ``[0, 1)``, nothing is left for training, ``max_samples`` is below 1,
            or an argument has another type.

    Example:
        >>> Splits(client_test=1.0)
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: Splits(client_test=1.0): expected a finite number in [0, 1). 0.1 is \
10 %.
    """

    rules: ClassVar[Rules] = (
        (lambda a: a.client_val + a.client_test < 1, "client_val and client_test leave no samples for training."),
    )

    server_val: Part = 0.1
    client_val: Part = 0.0
    client_test: Part = 0.0
    max_samples: Count | None = None
    drop_flagged: bool | FedBary = False
    seed: int | None = None

    @cached_property
    def detector(self) -> FedBary | None:
        """Method that flags the samples to leave out; None if no sample is to be left out."""
        return FedBary() if self.drop_flagged is True else self.drop_flagged or None


@dataclass(frozen=True)
class FederatedSplits:
    """Sorted indices, int64, of the server's validation samples and of each client's ``train``, ``val`` and
    ``test``."""

    server_val: Tensor
    clients: tuple[dict[str, Tensor], ...]
    names: tuple[str, ...] = ()


def split_federation(
    labels: Tensor,
    num_classes: int,
    groups: Tensor | None,
    pool: Tensor,
    partitioner: Partitioner,
    options: Splits,
    group_names: Sequence[str] = (),
    whole: bool = False,
) -> FederatedSplits:
    """Split the samples ``pool``, int64 ``[n]``, among the server and the clients; with ``whole`` each group must keep
    one."""
    everybody = pool
    if options.max_samples is not None:
        pool = shuffled(pool, generator_for(options.seed, "max_samples"))[: options.max_samples]
    pool = shuffled(pool, generator_for(options.seed, "server_val"))
    held_back = int(options.server_val * len(pool) + 0.5)
    if options.server_val > 0 and held_back == 0:
        given = f"Splits(server_val={options.server_val}) of {len(pool)} samples gives no sample"
        raise ConfigurationError(f"{given}. Raise it, or set it to 0 to train without validation.")
    server_val, rest = pool[:held_back].sort().values, pool[held_back:].sort().values
    if partitioner.keeps_groups and groups is not None:
        lost = sorted({*groups[everybody].tolist()} - {*groups[rest].tolist()})
        shown = listed([group_names[group] if group_names else group for group in lost], show=repr)
        message = (
            f"No sample is left to {shown}: all went to the server's validation set or were left out "
            f"(max_samples={options.max_samples}). Give the server its own data (val), or set server_val: 0."
        )
        if lost and whole:
            raise ConfigurationError(message)
        if lost:
            rank_zero_warn(message)
    parts = partitioner(labels[rest], num_classes, None if groups is None else groups[rest])
    called: tuple[str, ...] = ()
    if partitioner.keeps_groups and groups is not None and group_names:
        held = [groups[rest[part]].unique() for part in parts]
        # Clients with several groups have no names.
        called = tuple(group_names[int(each)] for each in held) if all(len(each) == 1 for each in held) else ()
    numbered = enumerate(parts, partitioner.first_client)
    clients = [_split_client(client, rest[part], options, called) for client, part in numbered]
    return FederatedSplits(server_val, tuple(clients), called)


def _split_client(client: int, samples: Tensor, options: Splits, names: Sequence[str]) -> dict[str, Tensor]:
    # At least one sample unless the share is 0, so that a mean score over clients includes all clients.
    val, test = (
        max(1, int(fraction * len(samples) + 0.5)) if fraction > 0 else 0
        for fraction in (options.client_val, options.client_test)
    )
    train = len(samples) - val - test
    if train < 1:
        raise ConfigurationError(
            f"{client_called(client, names, 'Client')} has {len(samples)} samples, of which client_val="
            f"{options.client_val} and client_test={options.client_test} leave none for training. Set them to 0, or "
            "partition so that every client has more (min_samples)."
        )
    order = shuffled(samples, generator_for(options.seed, "client_split", client))
    pieces = order.split([train, val, test])
    return {name: piece.sort().values for name, piece in zip(("train", "val", "test"), pieces, strict=True)}
