"""The data module in a Trainer, and asked wrongly."""

import itertools
import os

import pytest
import torch
from data_options import grouped
from small_sets import Flip, Images, Linear, X, Y, ready, trainer
from torch.utils.data import TensorDataset

from flsv.data import DirichletPartitioner, FederatedDataModule, GroupPartitioner, IIDPartitioner, TensorBatches
from flsv.errors import ConfigurationError

ROOT = os.environ.get("FLSV_DATA_ROOT")


# Who has what


def test_no_sample_is_in_two_places():
    data = ready(
        "digits",
        DirichletPartitioner(6, alpha=0.3, min_samples=5),
        server_val=0.15,
        client_val=0.1,
        client_test=0.2,
    )
    held = [data.client_indices(client, split) for client in range(6) for split in ("train", "val", "test")]
    sets = [set(indices.tolist()) for indices in [data.server_val_indices, *held]]
    assert all(not a & b for a, b in itertools.combinations(sets, 2))
    assert set().union(*sets) == set(range(1437))


def test_train_batches_are_a_function_of_the_generator():
    data = ready("digits")

    def order(seed):
        torch.rand(3)
        return torch.cat([x for x, _ in data.client_loader(2, generator=torch.Generator().manual_seed(seed))])

    assert torch.equal(order(1), order(1))
    assert not torch.equal(order(1), order(2))


def test_what_is_known_before_setup():
    assert FederatedDataModule(partitioner=IIDPartitioner(7)).num_clients == 7
    assert "num_clients" not in FederatedDataModule().describe()
    with pytest.raises(RuntimeError, match="not loaded yet"):
        _ = FederatedDataModule().class_counts
    with pytest.raises(RuntimeError, match="not loaded yet"):
        _ = FederatedDataModule(partitioner=GroupPartitioner()).num_clients


@pytest.mark.parametrize("preload", [False, True])
def test_train_transform_changes_training_batches_only(preload):
    data = ready((Images(), Images()), IIDPartitioner(2), train_transform=Flip(2.0), preload=preload, client_val=0.2)
    assert isinstance(data.client_loader(0), TensorBatches) is preload
    x = torch.cat([x for x, _ in data.client_loader(0)])
    assert torch.isclose(x.sum(), 2 * X[data.client_indices(0)].sum(), atol=1e-4)
    assert torch.equal(next(iter(data.val_dataloader()))[0], X[data.server_val_indices])
    assert torch.equal(next(iter(data.client_loader(1, "val")))[0], X[data.client_indices(1, "val")])
    pooled = torch.cat([x for x, _ in data.train_dataloader()])
    assert torch.isclose(pooled.sum(), 2 * sum(X[data.client_indices(c)].sum() for c in range(2)), atol=1e-4)


# In a Trainer


def test_the_centralized_baseline_trains_on_all_clients_data():
    data, model = FederatedDataModule((TensorDataset(X, Y), TensorDataset(X[:50], Y[:50]))), Linear()
    fit = trainer()
    fit.fit(model, data)
    assert len(torch.cat(model.seen["train"])) == 2 * 180
    assert len(torch.cat(model.seen["val"])) == 2 * 20
    fit.test(model, data)
    assert torch.equal(torch.cat(model.seen["test"]), Y[:50])
    assert torch.equal(torch.cat(fit.predict(model, data)), Y[:50])


def test_setup_again_changes_nothing():
    data, model = FederatedDataModule("digits"), Linear(64, 10)
    data.setup("fit")
    before = data._data
    fit = trainer(max_epochs=1)
    fit.fit(model, data)
    fit.validate(model, data, verbose=False)
    fit.test(model, data, verbose=False)
    assert data._data is before


# Asked wrongly


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "mnist"}, "data.files.download true"),
        ({"source": "diggits"}, "Did you mean 'digits'"),
        ({"source": "x.npz"}, "No data set 'x.npz' was found"),
        ({"source": Images(3)}, "3 samples is none"),
        ({"source": Images(4), "server_val": 0.0}, "4 samples cannot be dealt to 5 clients"),
        ({"source": TensorDataset(X), "partitioner": DirichletPartitioner(3, 0.5)}, "No class labels"),
        ({"partitioner": GroupPartitioner()}, "needs each sample's group"),
        ({"groups": "hospital"}, "have no such field"),
        ({"max_samples": 12, "client_test": 0.9}, "Client 0 has 3 samples"),
    ],
)
def test_wrong_data_are_found_in_setup(arguments, message, tmp_path):
    data = FederatedDataModule(**grouped({"source": "digits", "root": str(tmp_path), **arguments}))
    with pytest.raises(ConfigurationError, match=message):
        trainer().fit(Linear(64, 10), data)


# Real data


@pytest.mark.skipif(ROOT is None, reason="FLSV_DATA_ROOT is not set: no real image data")
@pytest.mark.parametrize("name", ["fashion_mnist", "pneumoniamnist.npz"])
def test_real_images_reach_the_clients(name):
    data = ready(name, DirichletPartitioner(5, alpha=0.3, min_samples=10), root=ROOT, max_samples=2000, client_test=0.2)
    assert all(isinstance(data.client_loader(client), TensorBatches) for client in range(5))
    own_val = name.endswith(".npz")
    assert len(data.server_val_indices) == (0 if own_val else 200)
    x, y = next(iter(data.val_dataloader()))
    assert x.shape[1:] == data.input_shape == (1, 28, 28)
    assert y.max() < data.num_classes
