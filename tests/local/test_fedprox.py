"""FedProx's gradient against autograd's."""

import pytest
import torch

from flsv.errors import ConfigurationError
from flsv.local import FedProx


def test_gradient_is_that_of_the_proximal_term() -> None:
    w = [torch.randn(3, 2, requires_grad=True), torch.randn(4, requires_grad=True)]
    anchors = [torch.randn(3, 2), torch.randn(4)]
    gradients = [torch.randn(3, 2), torch.randn(4)]
    before = [g.clone() for g in gradients]
    term = 0.7 / 2 * sum(((p - a) ** 2).sum() for p, a in zip(w, anchors))
    expected = torch.autograd.grad(term, w)
    FedProx(mu=0.7).add_gradients(w, gradients, anchors)
    for got, start, added in zip(gradients, before, expected):
        torch.testing.assert_close(got, start + added)


def test_negative_mu() -> None:
    with pytest.raises(ConfigurationError, match=r"mu=-1\): expected a number >= 0"):
        FedProx(mu=-1)
