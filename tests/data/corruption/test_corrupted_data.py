"""Corruptions in the data module: who is touched, who is not, and what it costs."""

import pytest
import torch
from data_options import grouped
from torch.utils.data import Dataset, Subset, TensorDataset

from flsv import Reporting
from flsv.data import (
    ClosedSetLabelNoise,
    Corruption,
    DirichletPartitioner,
    FederatedDataModule,
    GaussianNoise,
    IIDPartitioner,
    TensorBatches,
)
from flsv.errors import ConfigurationError
from flsv.seeding import generator_for

X = torch.randn(300, 2, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(300) % 5
BOTH = [ClosedSetLabelNoise(clients=[0]), GaussianNoise(sample_rate=0.3, clients=[0, 2])]


class Samples(Dataset):
    """Not tensors."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], int(Y[index])


class Watch(Corruption):
    """Writes down what it is given."""

    def __init__(self, **choice):
        super().__init__(**choice)
        self.seen = []

    def corrupt(self, x, y, num_classes, generator):
        self.seen.append((x.clone(), y.clone(), num_classes))
        x += 100
        return x, y


def ready(source=None, corruptions=None, **kwargs):
    kwargs.setdefault("client_val", 0.1)
    kwargs.setdefault("client_test", 0.1)
    source = TensorDataset(X, Y) if source is None else source
    data = FederatedDataModule(source, DirichletPartitioner(4, 1.0, 20), corruptions=corruptions, **grouped(kwargs))
    data.setup("fit")
    return data


def in_order(data, client):
    """A client's training samples in the order of its indices, as its loader gives them."""
    indices = data.client_indices(client)
    x, y = (torch.cat(column) for column in zip(*data.client_loader(client, generator=generator_for(3))))
    order = torch.randperm(len(indices), generator=generator_for(3))
    return x[order.argsort()], y[order.argsort()]


def test_only_the_chosen_clients_training_samples_change():
    data = ready(corruptions=BOTH)
    for client in range(4):
        indices = data.client_indices(client)
        x, y = in_order(data, client)
        noisy = (x != X[indices]).flatten(1).any(1)
        assert torch.equal(y, (Y[indices] + 1) % 5 if client == 0 else Y[indices])
        assert int(noisy.sum()) == (int(0.3 * len(indices) + 0.5) if client in (0, 2) else 0)
        assert torch.equal(data.corrupted_samples(client), noisy | (y != Y[indices]))
        assert torch.equal(data.class_counts[client], torch.bincount(y, minlength=5))
        for split in ("val", "test"):
            held = data.client_indices(client, split)
            for got, true in zip(next(iter(data.client_loader(client, split))), (X[held], Y[held])):
                assert torch.equal(got, true)
    assert data.malicious == [0, 2]
    for got, true in zip(next(iter(data.val_dataloader())), (X, Y)):
        assert torch.equal(got, true[data.server_val_indices])
    assert data.class_counts.sum() == sum(len(data.client_indices(client)) for client in range(4))


def test_the_data_set_is_not_modified():
    x, y = X.clone(), Y.clone()
    data = ready(TensorDataset(x, y), [Watch(clients=[1]), ClosedSetLabelNoise(clients=[2])])
    assert torch.equal(x, X)
    assert torch.equal(y, Y)
    assert all(isinstance(data.client_loader(client), TensorBatches) for client in range(4))


def test_inputs_are_copied_only_where_some_of_them_change():
    assert ready(corruptions=[ClosedSetLabelNoise(clients=[1])])._data.train.tensors[0] is X
    assert ready(corruptions=[GaussianNoise(clients=[1])])._data.train.tensors[0] is not X


def test_a_corruption_sees_one_clients_training_samples_and_nothing_else():
    watch = Watch(fraction=0.5)
    data = ready(corruptions=[watch])
    assert len(watch.seen) == 2
    for client, (x, y, num_classes) in zip(watch.chosen(4), watch.seen):
        assert torch.equal(x, X[data.client_indices(client)])
        assert torch.equal(y, Y[data.client_indices(client)])
        assert num_classes == 5


def test_corruptions_act_in_turn():
    watch = Watch()
    ready(corruptions=[ClosedSetLabelNoise(clients=[0]), watch, ClosedSetLabelNoise(clients=[0])])
    data = ready(corruptions=[ClosedSetLabelNoise(clients=[0]), watch, ClosedSetLabelNoise(clients=[0])])
    indices = data.client_indices(0)
    assert torch.equal(watch.seen[4][1], (Y[indices] + 1) % 5)
    assert torch.equal(in_order(data, 0)[1], (Y[indices] + 2) % 5)


def test_two_of_one_seed_are_two_draws_and_clients_draw_apart():
    data = ready(corruptions=[GaussianNoise(), GaussianNoise()])
    noise = [in_order(data, client)[0] - X[data.client_indices(client)] for client in range(4)]
    # Twice the same draw would have a deviation of 2, two draws have the root of 2.
    assert torch.cat(noise).std().item() == pytest.approx(2**0.5, rel=0.06)
    assert not torch.allclose(noise[0][:10], noise[1][:10])


def test_the_same_seed_gives_the_same_data_whoever_else_is_corrupted():
    alone, together = ready(corruptions=[GaussianNoise(clients=[2])]), ready(corruptions=[GaussianNoise()])
    assert torch.equal(in_order(alone, 2)[0], in_order(together, 2)[0])
    assert torch.equal(in_order(together, 2)[0], in_order(ready(corruptions=[GaussianNoise()]), 2)[0])
    other = ready(corruptions=[GaussianNoise(seed=1)])
    assert not torch.equal(in_order(together, 2)[0], in_order(other, 2)[0])


def test_noise_of_nothing_is_no_corruption():
    data = ready(corruptions=[GaussianNoise(std=0.0), ClosedSetLabelNoise(rate=0.0)])
    assert data.malicious == []
    assert ready().malicious == []
    assert not ready().corrupted_samples(0).any()
    assert len(ready().corrupted_samples(0)) == len(ready().client_indices(0))


def test_nan_inputs_that_stay_are_not_corrupted():
    x = X.clone()
    x[:, 0, 0] = torch.nan
    shares = {"server_val": 0.0, "client_val": 0.0, "client_test": 0.0}
    with pytest.warns(UserWarning, match="300 samples of the training data have NaN"):
        assert ready(TensorDataset(x, Y), [ClosedSetLabelNoise(rate=0.0)], **shares).malicious == []


def test_pooled_training_sees_the_corrupted_samples_too():
    data = ready(corruptions=[Watch(clients=[0])])
    x = torch.cat([batch[0] for batch in data.train_dataloader()])
    assert int((x > 50).flatten(1).all(1).sum()) == len(data.client_indices(0))


def test_a_transform_comes_after():
    data = ready(corruptions=[Watch(clients=[0])], train_transform=lambda x: -x)
    x, _ = next(iter(data.client_loader(0)))
    assert (x < -50).all()


def test_preloaded_data_and_data_that_are_not_tensors():
    data = ready(Samples(), BOTH, preload=True)
    plain = ready(corruptions=BOTH)
    for client in range(4):
        for got, expected in zip(in_order(data, client), in_order(plain, client)):
            assert torch.equal(got, expected)
    with pytest.raises(ConfigurationError, match=r"Samples is read sample by sample\. Say preload: true"):
        ready(Samples(), BOTH)


def test_a_subset_in_any_order_and_more_fields():
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:200]
    number = torch.arange(300)
    data = ready(Subset(TensorDataset(X, number, Y), order.tolist()), [Watch(clients=[0]), *BOTH])
    for client in range(4):
        indices = order[data.client_indices(client)]
        loader = data.client_loader(client, generator=generator_for(3))
        x, numbers, y = (torch.cat(column) for column in zip(*loader))
        assert sorted(numbers.tolist()) == sorted(indices.tolist())
        assert torch.equal(y, (Y[numbers] + 1) % 5 if client == 0 else Y[numbers])
        changed = (x != X[numbers]).flatten(1).any(1)
        assert (changed.all() if client == 0 else changed.any() == (client == 2)).item()


def test_batches_do_not_share_memory_with_the_data():
    data = ready(corruptions=[Watch(clients=[0])])
    x, _ = next(iter(data.client_loader(0)))
    x.zero_()
    assert (next(iter(data.client_loader(0)))[0] != 0).all()


def test_the_hyperparameters_tell():
    data = ready(corruptions=[ClosedSetLabelNoise(rate=0.1, clients=[0])])
    assert data.describe()["corruptions"] == "ClosedSetLabelNoise(rate=0.1, clients=[0])"
    assert "corruptions" not in ready().describe()


def test_wrong_corruptions():
    with pytest.raises(ConfigurationError, match="expected a list of flsv.data.Corruption"):
        FederatedDataModule("digits", corruptions=["noise"])
    with pytest.raises(ConfigurationError, match="no client 4"):
        ready(corruptions=[GaussianNoise(clients=[4])])
    with pytest.raises(ConfigurationError, match="last element .* is not their label"):
        ready(Labeled(X, torch.zeros(300)), [GaussianNoise()], preload=True)


class Labeled(TensorDataset):
    """Labels in an attribute, something else in the samples."""

    targets = Y


def test_training_on_flipped_labels_is_what_the_federation_does(tmp_path):
    from toys import Plain, fit, toy_sets

    from flsv.loop import FederatedLoop

    def accuracy(corruptions):
        train, test = toy_sets(300, 90)
        data = FederatedDataModule((train, test), IIDPartitioner(5), batch_size=8, corruptions=corruptions)
        module = fit(FederatedLoop(seed=0, reporting=Reporting(table=False)), tmp_path, Plain(), data, rounds=4)
        module.eval()
        return float((module(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean())

    assert accuracy(None) > 0.85
    assert accuracy([ClosedSetLabelNoise()]) < 0.1
