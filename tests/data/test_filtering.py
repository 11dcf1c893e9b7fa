"""Training on what is not flagged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from data_options import grouped
from torch.utils.data import TensorDataset
from toys import fit

from flsv.data import ClosedSetLabelNoise, FederatedDataModule, GaussianNoise, IIDPartitioner, Loader, Splits
from flsv.errors import ConfigurationError
from flsv.features import PCA
from flsv.loop import FederatedLoop
from flsv.valuation import FedBary


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


def test_another_detector_and_a_second_setup() -> None:
    flips = [ClosedSetLabelNoise(rate=0.1, clients=[0])]
    data = digits(corruptions=flips, drop_flagged=FedBary(PCA(20), label_weight=2.0))
    left = int(data.corrupted_samples(0).sum())
    assert left < 0.4 * int(digits(corruptions=flips).corrupted_samples(0).sum())
    counts = data.class_counts
    data.setup("validate")
    assert torch.equal(data.class_counts, counts)
    assert "dropped_samples" not in digits().describe()


def test_without_validation_data_the_clients_are_the_measure() -> None:
    whole, kept = digits(server_val=0.0), digits(server_val=0.0, drop_flagged=True)
    assert whole.corrupted_samples(1).sum() > 10 * kept.corrupted_samples(1).sum()


def test_a_fit_trains_on_what_is_left(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 6, generator=generator), torch.arange(200) % 3
    x[:20] += 40
    data = FederatedDataModule(TensorDataset(x, y), IIDPartitioner(2), batch_size=8, splits=Splits(drop_flagged=True))
    loop = FederatedLoop(seed=0)
    fit(loop, tmp_path, data=data, rounds=1)
    trained = torch.cat([batch[0] for client in range(2) for batch in data.client_loader(client)])
    assert trained.max() < 10
    assert data.num_samples.sum() == len(trained)


def test_nothing_left_or_no_full_batch() -> None:
    x, y = torch.full((40, 2), torch.nan), torch.arange(40) % 2
    x[::4] = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))
    partitioner = IIDPartitioner(2)
    with pytest.raises(ConfigurationError, match="not one full batch of 12"):
        FederatedDataModule(
            TensorDataset(x, y),
            partitioner,
            batch_size=12,
            loader=Loader(drop_last=True),
            splits=Splits(server_val=0.0, drop_flagged=True),
        ).setup("fit")
    x[:] = torch.nan
    with pytest.raises(ConfigurationError, match="no client has a sample that is finite"):
        FederatedDataModule(TensorDataset(x, y), partitioner, splits=Splits(server_val=0.0, drop_flagged=True)).setup(
            "fit"
        )
    with pytest.raises(ConfigurationError, match="before training"):
        digits(drop_flagged=FedBary("penultimate"))
