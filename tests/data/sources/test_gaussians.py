"""The synthetic set of ShapFed's figure 3."""

import torch

from flsv.data import FederatedDataModule, ProportionPartitioner, Splits, load_image_data
from flsv.data.sources.named import CENTRES, SPREAD, gaussians


def test_points_lie_around_their_centres_and_features_are_theirs():
    data = gaussians()
    features, labels = data.train.tensors
    x, y = features[:, 0], features[:, 1]
    torch.testing.assert_close(features[:, 2:], torch.stack([x * x, y * y, x * y], dim=1))
    assert torch.bincount(labels).tolist() == [1000] * 4
    for label, center in enumerate(CENTRES):
        points = features[labels == label, :2]
        torch.testing.assert_close(points.mean(0), torch.tensor(center), atol=0.1, rtol=0)
        torch.testing.assert_close(points.std(0), torch.full((2,), SPREAD), atol=0.06, rtol=0)


def test_always_the_same_and_test_points_are_others():
    first, second = gaussians(), load_image_data("Gaussians")
    assert torch.equal(first.train.tensors[0], second.train.tensors[0])
    assert not torch.equal(first.train.tensors[0][:2000], first.test.tensors[0])
    assert first.num_classes == len(first.class_names) == 4


def test_dealt_as_in_the_figure():
    matrix = [[0.75, 0.15, 0, 0], [0.25, 0.85, 0, 0], [0, 0, 0.05, 0.5], [0, 0, 0.95, 0.5]]
    data = FederatedDataModule("gaussians", ProportionPartitioner(matrix), splits=Splits(server_val=0))
    data.setup("fit")
    assert (data.class_counts - 1000 * torch.tensor(matrix)).abs().max() < 1
    assert data.input_shape == (5,)
