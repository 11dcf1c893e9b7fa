"""FedBary's values of samples: their parts, and through the protocol."""

import pytest
import torch
from functional.transport.samples import blobs, labeled

from flsv.functional import (
    calibrated_gradient,
    client_values,
    debiased_potential,
    direct_values,
    label_embedding,
)


def test_features_and_labels_parts_sum_to_the_whole_value() -> None:
    (x, y), (x2, y2) = blobs(60, 0), blobs(40, 1)
    parts = {part: direct_values(x, y, x2, y2, part=part) for part in ("features", "labels", "both")}  # type: ignore[arg-type]
    expected = parts["features"] + 2 * parts["labels"]
    for label in range(4):
        expected[y == label] -= expected[y == label].mean()
    torch.testing.assert_close(parts["both"], expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(parts["features"], calibrated_gradient(debiased_potential(x, x2)), atol=1e-3, rtol=1e-3)
    assert float(parts["both"].sum()) == pytest.approx(0, abs=1e-2)


def test_client_values_with_the_servers_embedding_equal_direct_values() -> None:
    (x, y), (x2, y2) = blobs(60, 0), blobs(40, 1)
    direct = direct_values(x, y, x2, y2, label_weight=2.0)
    found = client_values(x, y, label_embedding(x2, y2, label_weight=2.0), label_weight=2.0)
    torch.testing.assert_close(found, direct, atol=1e-2, rtol=1e-2)
    unlabeled = direct_values(x, None, x2, y2)
    torch.testing.assert_close(client_values(x, None, x2), unlabeled)
    torch.testing.assert_close(client_values(x, None, label_embedding(x2, y2)), unlabeled)
    assert torch.equal(direct_values(x, y, x2, None), unlabeled)


def test_one_sample_and_absent_classes_have_finite_values() -> None:
    x, y = labeled(0)
    assert direct_values(x[:1], y[:1], x, y).tolist() == [0.0]
    assert direct_values(x, y, x[y == 0], y[y == 0]).isfinite().all()
