"""Leaves out training samples that a valuation flags, before training begins.

Li et al., "Data Valuation and Detections in Federated Learning" (FedBary), CVPR 2024, table 3: the clients value their
samples against the server's validation set, through the protocol, and train on what is left.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flsv.data.federated_data import FederatedData, check_full_batches
from flsv.data.groups import client_called
from flsv.errors import ConfigurationError
from flsv.participants import LocalData
from flsv.seeding import generator_for
from flsv.valuation import FedBary, participants_of, sample_values
from flsv.valuation.sets import Dealt


def without_flagged(module: Dealt, dealt: FederatedData, detector: FedBary) -> FederatedData:
    """The data without the training samples that the clients flag; validation and test samples all stay.

    Args:
        module: holds ``dealt``.
        dealt: the data.
        detector: values the samples; its features must need no model.

    Raises:
        ConfigurationError: a client would be left without training samples.
    """
    clients, server = participants_of(module)
    detector.value(clients, server, generator_for(module.seed, "flagged samples"))
    splits, counts = [], []
    for client, parts in zip(clients, dealt.splits.clients):
        if not len(parts["train"]):
            splits.append(parts)
            counts.append(dealt.class_counts[client.id])
            continue
        keep, kept_counts = client.ask(_kept)
        if not keep.any():
            raise ConfigurationError(
                f"drop_flagged: all {len(keep)} training samples of {client_called(client.id, dealt.splits.names)} are "
                "flagged. Leave the client out, or set Splits(drop_flagged=False)."
            )
        splits.append({**parts, "train": parts["train"][keep]})
        counts.append(kept_counts)
    kept = replace(dealt.splits, clients=tuple(splits))
    check_full_batches(kept, dealt.train_options)
    return replace(dealt, splits=kept, class_counts=torch.stack(counts))


def _kept(local: LocalData) -> tuple[Tensor, Tensor]:
    """Which of its samples a client keeps, bool ``[m]``, and how many of each class these are."""
    keep = ~sample_values(local).flagged
    return keep, torch.bincount(local.samples()[1].cpu()[keep], minlength=local.num_classes)
