import pytest
import torch
from torch import nn


@pytest.fixture
def check_network():
    """Logits of the right shape, gradients everywhere, the head last, and as many parameters as computed by hand."""

    def check(network, num_classes, input_shape, parameters=None):
        torch.manual_seed(0)
        logits = network(torch.rand(3, *input_shape))
        assert logits.shape == (3, num_classes)
        logits.square().sum().backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in network.parameters())
        head = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
        assert head.out_features == num_classes
        assert next(reversed(list(network.parameters()))) is head.bias
        if parameters is not None:
            assert sum(p.numel() for p in network.parameters()) == parameters

    return check
