"""Tables by client: encoded by statistics that clients would send."""

import numpy as np
import pandas as pd
import pytest
import torch
from own_data import patients, ready

from flsv.data import Columns
from flsv.errors import ConfigurationError


def test_statistics_of_training_rows_are_what_the_clients_would_send():
    """Counts, sums, sums of squares and sets of categories of each client's training rows give the same features."""
    clients = {"Boston": patients(30, 1), "Lyon": patients(50, 2, 20.0), "Köln": patients(20, 3, -5.0)}
    data = ready(
        clients=clients,
        labels="ill",
        server_val=0.2,
        client_val=0.1,
        client_test=0.1,
        test=patients(10, 4),
    )
    ages = np.concatenate([np.array(frame["age"]) for frame in clients.values()])
    wards = np.concatenate([np.array(frame["ward"]) for frame in clients.values()])
    messages = []
    for client in range(3):
        x = ages[data.client_indices(client).numpy()]
        messages.append((len(x), x.sum(), (x * x).sum(), set(wards[data.client_indices(client).numpy()])))
    count, total, squares = (sum(message[i] for message in messages) for i in range(3))
    mean = total / count
    deviation = np.sqrt(squares / count - mean**2)
    categories = sorted(set().union(*(message[3] for message in messages)))
    expected = np.column_stack([(ages - mean) / deviation, *(wards == category for category in categories)])
    features = data._data.train.tensors[0]
    np.testing.assert_allclose(features.numpy(), expected, atol=1e-6)
    assert categories == ["A", "B", "only 1", "only 2", "only 3"]
    assert data._data.test.tensors[0].shape == (10, 6)
    assert data._data.test.tensors[0][:, 0].mean().item() == pytest.approx(
        float((np.array(patients(10, 4)["age"]) - mean).mean() / deviation), abs=1e-5
    )


def two_clients(**columns):
    """Of each column, Boston's values and Lyon's, repeated."""
    ages = np.random.default_rng(0).normal(size=(2, 30))
    return {
        name: pd.DataFrame({"age": ages[i], **{column: np.resize(values[i], 30) for column, values in columns.items()}})
        for i, name in enumerate(("Boston", "Lyon"))
    }


@pytest.mark.parametrize("words", [(False, True), ("no", "yes"), ("False", "True")])
def test_classes_that_two_clients_write_otherwise_are_refused(words):
    """1 and True would be two classes; the message names both clients."""
    with pytest.raises(ConfigurationError, match="numbers in the .* of 'Lyon' and words in the .* of 'Boston'"):
        ready(clients=two_clients(ill=(words, (0, 1))), labels="ill")
    assert len(ready(clients=two_clients(ill=(words, words)), labels="ill").class_names) == 2


def test_a_column_of_two_kinds_names_whose_it_is():
    clients = two_clients(ill=((0, 1), (0, 1)), smokes=((True, False), ("yes", "no")))
    with pytest.raises(ConfigurationError, match="of 'Boston' and categories in the .* of 'Lyon'"):
        ready(clients=clients, labels="ill")


def test_what_nobody_trains_on_changes_no_feature():
    clients = {"Boston": patients(30, 1), "Lyon": patients(50, 2)}
    options = {"labels": "ill", "server_val": 0.2, "client_test": 0.2}
    before = ready(clients=clients, **options)
    held = torch.cat([before.server_val_indices, before.client_indices(0, "test"), before.client_indices(1, "test")])
    for row in held.tolist():
        frame, place = (clients["Boston"], row) if row < 30 else (clients["Lyon"], row - 30)
        frame["age"][place] = 1e6
    after = ready(clients=clients, **options)
    for client in range(2):
        rows = before.client_indices(client)
        assert torch.equal(after.client_indices(client), rows)
        assert torch.equal(after._data.train.tensors[0][rows], before._data.train.tensors[0][rows])
    assert after._data.train.tensors[0][held, 0].min() > 1e3


def test_a_standardized_target_is_fitted_to_training_rows():
    clients = {"Boston": patients(30, 1), "Lyon": patients(50, 2, 100.0)}
    columns = Columns(task="regression", standardize_target=True, exclude=["ill"])
    data = ready(clients=clients, labels="age", columns=columns, server_val=0.3)
    y = data._data.train.tensors[1][torch.cat([data.client_indices(0), data.client_indices(1)])]
    assert y.mean().item() == pytest.approx(0, abs=1e-5)
    assert y.std(unbiased=False).item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "clustering"}, r"Columns\(task='clustering'\): expected .classification"),
        ({"features": "age"}, r"Columns\(features='age'\): expected a list"),
        ({"max_categories": 1}, "of at least 2"),
        ({"standardize_target": True}, "classes have no mean"),
    ],
)
def test_columns_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Columns(**options)
