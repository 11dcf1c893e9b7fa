"""Networks without convolutions: softmax regression and the multi-layer perceptron, for samples of any shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from flsv.models.shapes import check_num_classes, flat_size


def dense_stack(widths: Sequence[int], dropout: float = 0.0) -> nn.Sequential:
    """Linear layers between consecutive ``widths``, ReLU after each but the last, dropout before each if asked for.

    Example:
        >>> dense_stack([400, 120, 84, 10])[-1]
        Linear(in_features=84, out_features=10, bias=True)
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Dropout(dropout)] if dropout else []
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class SoftmaxRegression(nn.Module):
    """Multinomial logistic regression: the convex model, with a global optimum to compare against.

    ==========  =======================  ==========================
    layer       output                   parameters
    ==========  =======================  ==========================
    flatten     D = product of the shape
    linear      M                        D M + M
    ==========  =======================  ==========================

    7,850 parameters for 28x28 grey images and 10 classes.

    Args:
        num_classes: M, at least 2.
        input_shape: shape of one sample without the batch; (C, H, W) for images, (D,) for rows of a table.

    Raises:
        ConfigurationError: fewer than two classes, or no valid shape.

    Example:
        >>> import torch
        >>> SoftmaxRegression(num_classes=10, input_shape=(1, 8, 8))(torch.rand(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(self, num_classes: int = 10, input_shape: Sequence[int] = (1, 28, 28)) -> None:
        super().__init__()
        check_num_classes("SoftmaxRegression", num_classes)
        self.classifier = nn.Linear(flat_size("SoftmaxRegression", input_shape), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[B, M]`` of a batch ``[B, *input_shape]``."""
        return self.classifier(x.flatten(1))


class MLP(nn.Module):
    """Multi-layer perceptron with ReLU; the default is McMahan et al.'s "2NN".

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, sec. 3:
    "a simple multilayer-perceptron with 2-hidden layers with 200 units each using ReLu activations (199,210 total
    parameters), which we refer to as the MNIST 2NN".

    =============  ==========  ===============
    layer          output      parameters
    =============  ==========  ===============
    flatten        784
    linear, ReLU   200         157,000
    linear, ReLU   200         40,200
    linear         10          2,010
    =============  ==========  ===============

    Args:
        num_classes: M, at least 2.
        input_shape: shape of one sample without the batch; (C, H, W) for images, (D,) for rows of a table.
        hidden: width of each hidden layer; empty for softmax regression.

    Raises:
        ConfigurationError: fewer than two classes, or no valid shape.

    Example:
        >>> sum(p.numel() for p in MLP().parameters())
        199210
    """

    def __init__(
        self, num_classes: int = 10, input_shape: Sequence[int] = (1, 28, 28), hidden: Sequence[int] = (200, 200)
    ) -> None:
        super().__init__()
        check_num_classes("MLP", num_classes)
        self.classifier = dense_stack([flat_size("MLP", input_shape), *hidden, num_classes])

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[B, M]`` of a batch ``[B, *input_shape]``."""
        return self.classifier(x.flatten(1))
