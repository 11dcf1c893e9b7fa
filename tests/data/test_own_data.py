"""A user's own data by client: data sets, arrays, paths, and what is refused."""

import pytest
import torch
from frames import Frame
from own_data import HERE, WORDS, Rows, X, Y, ready
from torch.utils.data import Subset, TensorDataset

from flsv.data import (
    Columns,
    FederatedDataModule,
    IIDPartitioner,
    OneClient,
    TableData,
)
from flsv.errors import ConfigurationError


def test_data_sets_by_client():
    data = ready(clients={"Boston": HERE, "Lyon": Subset(HERE, list(range(30, 60)))}, client_val=0.1)
    assert data.client_names == ("Boston", "Lyon")
    assert data.num_clients == 2
    assert len(data.server_val_indices) == 9
    # The samples are one after the other, and nobody has another's.
    assert all(index < 60 for index in data.client_indices(0).tolist())
    assert all(index >= 60 for index in data.client_indices(1).tolist())
    x, y = next(iter(data.client_loader(1, shuffle=False)))
    rows = data.client_indices(1)[: len(x)] - 60 + 30
    assert torch.equal(x, HERE.tensors[0][rows])
    assert torch.equal(y, HERE.tensors[1][rows])


def test_classes_have_one_numbering():
    data = ready(
        clients={"a": (X, WORDS[Y]), "b": (X[:9], ["eel"] * 9)},
        server_val=0.0,
        test=(X[:4], ["dog", "cat"] * 2),
    )
    assert data.class_names == ("cat", "dog", "eel")
    assert data.class_counts.tolist() == [[20, 20, 20], [0, 0, 9]]
    assert next(iter(data.test_dataloader()))[1].tolist() == [1, 0, 1, 0]


def test_named_classes_of_data_sets_are_numbered_anew_by_their_names():
    few = TensorDataset(torch.zeros(10, 4), torch.tensor([0, 1] * 5))
    few.classes = ("dog", "yak")
    whole = TensorDataset(*HERE.tensors)
    whole.classes = tuple(WORDS)
    data = ready(clients={"few": few, "whole": whole}, server_val=0.0)
    assert data.class_names == ("cat", "dog", "eel", "yak")
    assert data.class_counts.tolist() == [[0, 5, 0, 5], [20, 20, 20, 0]]
    assert few.tensors[1].tolist() == [0, 1] * 5  # the user's own
    with pytest.raises(ConfigurationError, match="labels of a Rows cannot be numbered anew"):
        ready(clients={"few": few, "rows": Rows(classes=("cat", "dog", "eel"))})
    with pytest.raises(ConfigurationError, match=r"'here' has no names for its classes"):
        ready(clients={"few": few, "here": HERE})


@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        ({"a": HERE}, {}, "the data of at least 2 clients by name"),
        ({"a": HERE, "b": HERE}, {"source": "mnist"}, "neither source nor groups"),
        ({"a": HERE, "b": HERE}, {"groups": [1, 2]}, "neither source nor groups"),
        (
            {"a": HERE, "b": HERE},
            {"partitioner": IIDPartitioner(2)},
            r"by client \('a', 'b'\), and IIDPartitioner.* anew",
        ),
        ({"a": HERE, "b": HERE}, {"columns": Columns()}, "columns says .*: say labels, the one to predict"),
        ({"a": HERE, "b": HERE}, {"labels": "y"}, "labels='y': TensorDataset has no attribute 'y'"),
        ({"a": HERE, "b": Frame(a=[1, 2], y=[0, 1])}, {"labels": "y"}, "'b' is a table and 'a' is not .TensorDataset."),
        ({"a": HERE, "b": (X[:0], Y[:0])}, {}, "client 'b': there are no samples"),
        (
            {"a": HERE, "b": (X[:, :3], Y)},
            {},
            "those of 'a' .*those of 'b' ",
        ),
        ({"a": HERE, "b": None}, {}, "client 'b': a NoneType cannot be read as samples"),
        ({"a": HERE, "b": {"x": X}}, {}, "client 'b': a dict cannot be read"),
        ({"a": HERE, "b": iter([1])}, {}, "client 'b': a list_iterator cannot be read"),
        ({"a": HERE, "b": "digits"}, {}, "client 'b': 'digits' was not found, or cannot be read"),
        ({"a": HERE, "b": FederatedDataModule()}, {}, "client 'b': a FederatedDataModule cannot be read"),
        ({"a": HERE, "a ": HERE}, {}, "Clients are called .* and differ"),
        ({1: HERE, "1": HERE}, {}, "Clients are called .* and differ"),
        (
            {"a": HERE, "b": (X[:2], Y[:2])},
            {"client_val": 0.4, "client_test": 0.5},
            r"Client 1 \('b'\) has 2 samples, of which",
        ),
        (
            {"a": HERE, "b": (X[:2], Y[:2])},
            {"drop_last": True, "batch_size": 8},
            r"Client 1 \('b'\) has .* not one full",
        ),
    ],
)
def test_refused(clients, options, message):
    with pytest.raises(ConfigurationError, match=message):
        ready(clients=clients, server_val=0.0, **options)


def test_a_client_is_not_lost_to_the_servers_validation_set():
    clients = {"a": HERE, "Lyon": (X[:1], Y[:1])}
    lost = [seed for seed in range(30) if not _kept(clients, seed)]
    assert 3 < len(lost) < 27
    with pytest.raises(ConfigurationError, match="Nothing is left to 'Lyon': all their samples went to the server"):
        ready(clients=clients, server_val=0.5, seed=lost[0])
    both = TensorDataset(torch.cat([HERE.tensors[0], HERE.tensors[0]]), torch.cat([HERE.tensors[1]] * 2))
    with pytest.warns(UserWarning, match="Nothing is left to 'c'"):
        data = ready(Subset(both, range(61)), groups=["a"] * 30 + ["b"] * 30 + ["c"], server_val=0.5, seed=lost[0])
    assert data.client_names == ("a", "b")


def test_server_data_beside_any_source():
    data = ready(HERE, val=(X[:5], Y[:5]), test=(X[:6], Y[:6]))
    assert len(data.server_val_indices) == 0
    assert sum(len(y) for _, y in data.val_dataloader()) == 5
    assert sum(len(y) for _, y in data.test_dataloader()) == 6
    with pytest.raises(ConfigurationError, match="test: the source has test data of its own"):
        ready((HERE, HERE), test=HERE)
    with pytest.raises(ConfigurationError, match="A data module reads its own"):
        ready(FederatedDataModule(), labels="y", columns=Columns())


def test_a_path_and_a_site(tmp_path):
    file = tmp_path / "all.csv"
    file.write_text("age,ward,ill\n" + "".join(f"{i},{'ab'[i % 2]},{i % 3 % 2}\n" for i in range(40)))
    assert ready(file, labels="ill", groups="ward").client_names == ("a", "b")
    assert ready((file, file), labels="ill", groups="ward").num_clients == 2
    assert ready(file, labels="ill", groups=[i % 3 for i in range(40)]).num_clients == 3
    with pytest.raises(ConfigurationError, match="A table of one site alone cannot be encoded"):
        ready(file, OneClient(), labels="ill")
    with pytest.raises(ConfigurationError, match="A table of one site alone cannot be encoded"):
        ready(TableData(str(file), "ill"), OneClient())
    with pytest.raises(ConfigurationError, match="a NoneType cannot be read as samples"):
        ready(None)
