"""LeNet-5 and its smaller relatives.

LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 86(11), 1998.
As everybody builds it today: ReLU and max-pooling instead of scaled tanh and trainable subsampling, every map of the
second convolution connected to every map of the first, and a linear layer with softmax instead of RBF units.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from flsv.models.layers import conv_stack, dense_stack
from flsv.models.shapes import check_num_classes, pooled_positions


class LeNet5(nn.Module):
    """Two 5x5 convolutions with 2x2 max-pooling, then fully connected layers.

    For (1, 28, 28) and 10 classes, 44,426 parameters:

    =======================  ==========  ===============
    layer                    output      parameters
    =======================  ==========  ===============
    conv 5x5, ReLU           6x24x24     156
    max-pool 2x2             6x12x12
    conv 5x5, ReLU           16x8x8      2,416
    max-pool 2x2             16x4x4
    linear, ReLU             120         30,840
    linear, ReLU             84          10,164
    linear                   10          850
    =======================  ==========  ===============

    (1, 32, 32), LeCun's own size, has 61,706 and (3, 32, 32) has 62,006 parameters.
    ``LeNet5(channels=(10, 20), hidden=(50,))`` is the common small variant (conv5-10, pool, conv5-20, pool, fc50, fc10)
    with 21,840.

    Args:
        num_classes: M, at least 2.
        input_shape: (channels, height, width) of one image; at least 16x16 without padding, 4x4 with ``padding=2``.
        channels: output channels of each convolution, at least one.
        hidden: widths of the fully connected layers before the classifier.
        padding: zeros added on every side by both convolutions.

    Raises:
        ConfigurationError: fewer than two classes, no image shape, no convolutions, or images that are too small.

    Example:
        >>> import torch
        >>> LeNet5(num_classes=100, input_shape=(3, 32, 32))(torch.rand(5, 3, 32, 32)).shape
        torch.Size([5, 100])
        >>> sum(p.numel() for p in LeNet5(channels=(10, 20), hidden=(50,)).parameters())
        21840
    """

    def __init__(
        self,
        num_classes: int = 10,
        input_shape: Sequence[int] = (1, 28, 28),
        channels: Sequence[int] = (6, 16),
        hidden: Sequence[int] = (120, 84),
        padding: int = 0,
    ) -> None:
        super().__init__()
        check_num_classes("LeNet5", num_classes)
        hint = "" if padding else ", pass padding=2 (network_args: {padding: 2})"
        positions = pooled_positions("LeNet5", input_shape, [(5, padding)] * len(channels), hint)
        self.features = conv_stack([input_shape[0], *channels], kernel=5, padding=padding)
        self.classifier = dense_stack([channels[-1] * positions, *hidden, num_classes])

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[B, M]`` of images ``[B, C, H, W]``."""
        return self.classifier(self.features(x).flatten(1))
