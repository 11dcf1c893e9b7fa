"""Notes on a federation's table: equal rows, columns with one value, and columns that alone tell the label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np
from sklearn.metrics import roc_auc_score
from sklearn.tree import DecisionTreeClassifier

from flsv.data import FederatedDataModule
from flsv.tables.dictionary import Column, Dictionary
from flsv.tables.inference import MIN_COMPARED, MIN_ROWS
from flsv.tables.merger import MAX_DICTIONARIES
from flsv.utilities.errors import listed

#: A column tells the label if a tree with as many leaves as classes has a larger AUROC by it alone.
MAX_AUROC = 0.98
#: Largest number of rows of which a tree is made.
MAX_TREE_ROWS = 10_000
#: Largest number of clients, or of columns, that a note names.
_MAX_NAMED = 8
#: Name of the rows of all clients together.
_ALL = ""


def notes_on_table(data: FederatedDataModule) -> list[str]:
    """Return notes on the clients' training rows of a table, none for other data."""
    dictionary = data.dictionary
    if not isinstance(dictionary, Dictionary):
        return []
    owners_of_constant = {}
    owners_told = {}
    inputs = data.division.source.tensors[0].cpu().numpy()
    rows_by_owner = _rows_by_owner(data)
    for name, column in dictionary.columns.items():
        features = inputs[:, _positions_of(dictionary, name, column)]
        is_missing = _is_missing(data, name)
        owners_of_constant[name] = [
            owner
            for owner, rows in rows_by_owner.items()
            if _has_one_value(features[rows]) and not is_missing[rows].all()
        ]
        if data.no_classes is None:
            labels = data.division.classes.labels.numpy()
            owners_told[name] = [
                owner
                for owner, rows in rows_by_owner.items()
                if _tells(features[rows], labels[rows])
            ]

    notes = {
        "Rows that repeat another one of the same client in all columns that are used: {}.": (
            _counts_of_repeated_rows(data)
        ),
        "Columns with one value: {}.": _with_owners(owners_of_constant),
        "Columns that alone tell the label: {}. Exclude those that are not known before the label.": (
            _with_owners(owners_told)
        ),
    }
    return [note.format(listed(parts, _MAX_NAMED)) for note, parts in notes.items() if parts]


def _rows_by_owner(data: FederatedDataModule) -> dict[str, np.ndarray]:
    """Return the training rows of all clients together, and of each client unless there are many."""
    rows_by_client = {}
    for client, name in enumerate(data.client_names):
        rows_by_client[name] = data.client_indices(client).numpy()
    all_rows = np.concatenate(list(rows_by_client.values()))
    if 1 < len(rows_by_client) <= MAX_DICTIONARIES:
        return {_ALL: all_rows, **rows_by_client}
    return {_ALL: all_rows}


def _positions_of(dictionary: Dictionary, name: str, column: Column) -> list[int]:
    """Return the positions of a column's features among all features."""
    names = {name, f"{name} missing"}
    names.update(f"{name}={category}" for category in column.categories or ())
    return [
        position for position, feature in enumerate(dictionary.feature_names) if feature in names
    ]


def _is_missing(data: FederatedDataModule, name: str) -> np.ndarray:
    (card,) = [card for card in data.division.source.columns if card.name == name]
    return card.is_missing


def _has_one_value(features: np.ndarray) -> bool:
    return bool((features == features[:1]).all())


def _tells(features: np.ndarray, labels: np.ndarray) -> bool:
    """Return whether a tree with as many leaves as classes predicts the labels from the features of one column."""
    if len(labels) > MAX_TREE_ROWS:
        rows = np.linspace(0, len(labels) - 1, MAX_TREE_ROWS).astype(int)
        features = features[rows]
        labels = labels[rows]
    classes, counts = np.unique(labels, return_counts=True)
    # A few rows can be told by chance.
    frequent_classes = classes[counts >= MIN_ROWS]
    is_frequent = np.isin(labels, frequent_classes)
    if len(frequent_classes) < 2 or is_frequent.sum() < MIN_COMPARED:
        return False

    features = features[is_frequent]
    labels = labels[is_frequent]
    tree = DecisionTreeClassifier(max_leaf_nodes=len(frequent_classes), random_state=0)
    probabilities = tree.fit(features, labels).predict_proba(features)
    if len(frequent_classes) == 2:
        probabilities = probabilities[:, 1]
    return bool(roc_auc_score(labels, probabilities, multi_class="ovr") > MAX_AUROC)


def _with_owners(owners_by_column: Mapping[str, Sequence[str]]) -> list[str]:
    """Name each column with the clients whose rows are concerned, alone if the rows of all together are."""
    texts = []
    for name, owners in owners_by_column.items():
        if _ALL in owners:
            texts.append(name)
        elif owners:
            texts.append(f"{name} at {listed(owners, 3)}")
    return texts


def _counts_of_repeated_rows(data: FederatedDataModule) -> list[str]:
    sample_hashes = data.division.sample_hashes
    assert sample_hashes is not None  # tables are in memory
    counts = []
    for client, name in enumerate(data.client_names):
        hashes = sample_hashes[data.client_indices(client).numpy()]
        num_repeated = len(hashes) - len(np.unique(hashes))
        if num_repeated:
            counts.append((num_repeated, f"{num_repeated} of {len(hashes)} at {name}"))
    counts.sort(key=itemgetter(0), reverse=True)
    return [text for _, text in counts]
