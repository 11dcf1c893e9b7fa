"""ShapFed's network for chest X-rays.

Tastan, Fares, Aremu, Horváth, Nandakumar, "Redefining Contributions: Shapley-Driven Federated Learning", IJCAI 2024,
sec. 5.2: "a custom CNN architecture with three convolution layers followed by three fully connected layers. All the
layers (except the last) are followed by ReLU activation." Widths, kernels and pooling are given neither there nor in
the authors' published code. The choice here is the plainest one: padded 3x3 convolutions that double their channels
while a 2x2 max-pooling halves the image, and LeNet-5's fully connected layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from flsv.models.layers import conv_stack, dense_stack
from flsv.models.shapes import check_num_classes, pooled_positions


class ShapFedCNN(nn.Module):
    """Three padded 3x3 convolutions with 2x2 max-pooling, then three fully connected layers.

    For (1, 28, 28) and 2 classes, 102,870 parameters:

    ==============================  ==========  ===============
    layer                           output      parameters
    ==============================  ==========  ===============
    conv 3x3, padding 1, ReLU       16x28x28    160
    max-pool 2x2                    16x14x14
    conv 3x3, padding 1, ReLU       32x14x14    4,640
    max-pool 2x2                    32x7x7
    conv 3x3, padding 1, ReLU       64x7x7      18,496
    max-pool 2x2                    64x3x3
    linear, ReLU                    120         69,240
    linear, ReLU                    84          10,164
    linear                          2           170
    ==============================  ==========  ===============

    Args:
        num_classes: M, at least 2.
        input_shape: (channels, height, width) of one image, at least 8x8.
        channels: output channels of each convolution, at least one.
        hidden: widths of the fully connected layers before the classifier.

    Raises:
        ConfigurationError: fewer than two classes, no image shape, no convolutions, or images that are too small.

    Example:
        >>> sum(p.numel() for p in ShapFedCNN().parameters())
        102870
    """

    def __init__(
        self,
        num_classes: int = 2,
        input_shape: Sequence[int] = (1, 28, 28),
        channels: Sequence[int] = (16, 32, 64),
        hidden: Sequence[int] = (120, 84),
    ) -> None:
        super().__init__()
        check_num_classes("ShapFedCNN", num_classes)
        positions = pooled_positions("ShapFedCNN", input_shape, [(3, 1)] * len(channels))
        self.features = conv_stack([input_shape[0], *channels], kernel=3, padding=1)
        self.classifier = dense_stack([channels[-1] * positions, *hidden, num_classes])

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[B, M]`` of images ``[B, C, H, W]``."""
        return self.classifier(self.features(x).flatten(1))
