"""fastText on hashes, against torch's own bag of embeddings."""

import pytest
import torch
from torch.nn.functional import embedding_bag

from flsv.errors import ConfigurationError
from flsv.models import FastText


def test_it_is_the_mean_of_the_words_vectors():
    network = FastText(3, (5,), buckets=11, width=4)
    hashes = torch.tensor([[7, 4026989588, 17, 0, 0], [3, 0, 0, 0, 0], [1, 2, 3, 4, 5]])
    # Hashes that differ by a multiple of 10 share a vector.
    rows = torch.tensor([[8, 9, 8, 0, 0], [4, 0, 0, 0, 0], [2, 3, 4, 5, 6]])
    mean = embedding_bag(rows, network.embedding.weight, mode="mean", padding_idx=0)
    torch.testing.assert_close(network(hashes), network.classifier(mean))


def test_a_text_without_words():
    network = FastText(3, (2,), buckets=11)
    assert torch.equal(network(torch.zeros(1, 2, dtype=torch.long))[0], network.classifier.bias)


def test_padding_is_not_trained():
    network = FastText(2, (3,), buckets=5, width=4)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        network(torch.tensor([[3, 0, 0], [9, 2, 0]])).logsumexp(1).sum().backward()
        optimizer.step()
    assert (network.embedding.weight[0] == 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (1, 28, 28)}, "is no text's shape"),
        ({"buckets": 1}, "of at least 2"),
        ({"width": 0}, "of at least 1"),
        ({"num_classes": 1}, "of at least 2"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        FastText(**arguments)
