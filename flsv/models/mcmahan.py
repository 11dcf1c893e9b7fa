"""The CNN of the paper that introduced federated averaging.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, sec. 3: "A CNN with two 5x5 convolution layers (the first with 32 channels, the second with 64,
each followed with 2x2 max pooling), a fully connected layer with 512 units and ReLu activation, and a final softmax
output layer (1,663,370 total parameters)." That number holds for padded convolutions only; the activation after the
convolutions, which the paper leaves out, is ReLU here. pFedSV (Wu et al.) uses the same network on all its data sets.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from flsv.models.layers import conv_stack, dense_stack
from flsv.models.shapes import check_num_classes, pooled_positions


class McMahanCNN(nn.Module):
    """Two padded 5x5 convolutions with 2x2 max-pooling and one wide fully connected layer.

    For (1, 28, 28) and 10 classes, 1,663,370 parameters:

    ==============================  ==========  ===============
    layer                           output      parameters
    ==============================  ==========  ===============
    conv 5x5, padding 2, ReLU       32x28x28    832
    max-pool 2x2                    32x14x14
    conv 5x5, padding 2, ReLU       64x14x14    51,264
    max-pool 2x2                    64x7x7
    linear, ReLU                    512         1,606,144
    linear                          10          5,130
    ==============================  ==========  ===============

    Args:
        num_classes: M, at least 2.
        input_shape: (channels, height, width) of one image, at least 4x4.
        hidden: width of the fully connected layer.

    Raises:
        ConfigurationError: fewer than two classes, no image shape, or images that are too small.

    Example:
        >>> sum(p.numel() for p in McMahanCNN().parameters())
        1663370
    """

    def __init__(self, num_classes: int = 10, input_shape: Sequence[int] = (1, 28, 28), hidden: int = 512) -> None:
        super().__init__()
        check_num_classes("McMahanCNN", num_classes)
        positions = pooled_positions("McMahanCNN", input_shape, [(5, 2), (5, 2)])
        self.features = conv_stack([input_shape[0], 32, 64], kernel=5, padding=2)
        self.classifier = dense_stack([64 * positions, hidden, num_classes])

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[B, M]`` of images ``[B, C, H, W]``."""
        return self.classifier(self.features(x).flatten(1))
