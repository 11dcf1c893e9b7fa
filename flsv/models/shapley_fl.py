"""ShapleyFL's two networks, "FMNIST-CNN" and "CIFAR-CNN".

Sun, Xiong, Li, Liu, Zhang, Liu, Qin, Ren, "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023.
Paper and appendix name them (Table 3) and say only "the CNN network is adopted as the central model"; the layers are
those of the authors' published code. That code ends in log-softmax; here, as everywhere in flsv, logits come out, and
cross-entropy on them is the same loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from flsv.arguments import check_number
from flsv.models.layers import conv_stack, dense_stack
from flsv.models.shapes import check_num_classes, pooled_positions


class ShapleyFLFashionCNN(nn.Module):
    """ShapleyFL's FMNIST-CNN: two padded 5x5 convolutions with batch normalisation, and the classifier.

    For (1, 28, 28) and 10 classes, 29,034 parameters:

    ==================================  ==========  ===============
    layer                               output      parameters
    ==================================  ==========  ===============
    conv 5x5, padding 2, BN, ReLU       16x28x28    416 + 32
    max-pool 2x2                        16x14x14
    conv 5x5, padding 2, BN, ReLU       32x14x14    12,832 + 64
    max-pool 2x2                        32x7x7
    linear                              10          15,690
    ==================================  ==========  ===============

    Args:
        num_classes: M, at least 2.
        input_shape: (channels, height, width) of one image, at least 4x4.

    Raises:
        ConfigurationError: fewer than two classes, no image shape, or images that are too small.

    Example:
        >>> sum(p.numel() for p in ShapleyFLFashionCNN().parameters())
        29034
    """

    def __init__(self, num_classes: int = 10, input_shape: Sequence[int] = (1, 28, 28)) -> None:
        super().__init__()
        check_num_classes("ShapleyFLFashionCNN", num_classes)
        positions = pooled_positions("ShapleyFLFashionCNN", input_shape, [(5, 2), (5, 2)])
        self.features = conv_stack([input_shape[0], 16, 32], kernel=5, padding=2, batch_norm=True)
        self.classifier = nn.Linear(32 * positions, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[B, M]`` of images ``[B, C, H, W]``."""
        return self.classifier(self.features(x).flatten(1))


class ShapleyFLCifarCNN(nn.Module):
    """ShapleyFL's CIFAR-CNN: two padded 3x3 convolutions and two fully connected layers with dropout.

    For (3, 32, 32) and 10 classes, 1,059,306 parameters:

    ==============================  ==========  ===============
    layer                           output      parameters
    ==============================  ==========  ===============
    conv 3x3, padding 1, ReLU       16x32x32    448
    max-pool 2x2                    16x16x16
    conv 3x3, padding 1, ReLU       32x16x16    4,640
    max-pool 2x2                    32x8x8
    dropout, linear, ReLU           512         1,049,088
    dropout, linear                 10          5,130
    ==============================  ==========  ===============

    Args:
        num_classes: M, at least 2.
        input_shape: (channels, height, width) of one image, at least 4x4.
        dropout: probability of both dropout layers.

    Raises:
        ConfigurationError: fewer than two classes, no image shape, images that are too small, or another dropout.

    Example:
        >>> sum(p.numel() for p in ShapleyFLCifarCNN().parameters())
        1059306
    """

    def __init__(self, num_classes: int = 10, input_shape: Sequence[int] = (3, 32, 32), dropout: float = 0.2) -> None:
        super().__init__()
        check_num_classes("ShapleyFLCifarCNN", num_classes)
        check_number(self, "dropout", dropout, least=0, most=1)
        positions = pooled_positions("ShapleyFLCifarCNN", input_shape, [(3, 1), (3, 1)])
        self.features = conv_stack([input_shape[0], 16, 32], kernel=3, padding=1)
        self.classifier = dense_stack([32 * positions, 512, num_classes], dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[B, M]`` of images ``[B, C, H, W]``."""
        return self.classifier(self.features(x).flatten(1))
