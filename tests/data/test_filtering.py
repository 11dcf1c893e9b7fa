"""Training on what is not flagged."""

from __future__ import annotations

from typing import Any

import torch
from data_options import grouped

from flsv.data import FederatedDataModule, GaussianNoise, IIDPartitioner


def digits(**kwargs: Any) -> FederatedDataModule:
    kwargs.setdefault("corruptions", [GaussianNoise(std=1.0, sample_rate=0.2, clients=[1])])
    data = FederatedDataModule("digits", IIDPartitioner(3), batch_size=16, **grouped({"client_val": 0.1, **kwargs}))
    data.setup("fit")
    return data


def test_only_flagged_training_samples_are_dropped_and_counts_follow() -> None:
    whole, kept = digits(), digits(drop_flagged=True)
    noisy = set(whole.client_indices(1)[whole.corrupted_samples(1)].tolist())
    for client in range(3):
        before, after = set(whole.client_indices(client).tolist()), set(kept.client_indices(client).tolist())
        assert after < before or after == before
        dropped = before - after
        assert len(dropped) < 0.3 * len(before)
        if client == 1:
            assert len(dropped & noisy) >= 0.95 * len(noisy)
        for split in ("val", "test"):
            assert torch.equal(whole.client_indices(client, split), kept.client_indices(client, split))
        labels = torch.cat([y for _, y in kept.client_loader(client)])
        assert torch.equal(torch.bincount(labels, minlength=10), kept.class_counts[client])
    assert torch.equal(whole.server_val_indices, kept.server_val_indices)
    assert kept.describe()["dropped_samples"] == int(whole.num_samples.sum() - kept.num_samples.sum())
    assert kept.describe()["train_samples"] == int(kept.num_samples.sum())
