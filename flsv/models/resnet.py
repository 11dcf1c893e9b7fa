"""ResNet-34 for small images, the network of ShapFed's CIFAR-10 experiments.

He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, table 1. ShapFed (Tastan et al., IJCAI
2024, sec. 5.2) says "the ResNet-34 architecture"; the authors' published code replaces the stem, which would shrink a
32x32 image to 8x8 before the first block, by a 3x3 convolution of stride 1 without max-pooling, and so does this one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torchvision.models import ResNet, resnet34

from flsv.models.shapes import check_num_classes, image_shape


def resnet34_small(num_classes: int = 10, input_shape: Sequence[int] = (3, 32, 32)) -> ResNet:
    """torchvision's ResNet-34 with a 3x3 stride-1 stem and no max-pooling; its head is ``fc``.

    For (3, 32, 32) and 10 classes, 21,282,122 parameters and 17,024 running statistics:

    ==================================  ==========  ===============
    layer                               output      parameters
    ==================================  ==========  ===============
    conv 3x3, stride 1, BN, ReLU        64x32x32    1,856
    3 basic blocks                      64x32x32    221,952
    4 basic blocks, first stride 2      128x16x16   1,116,416
    6 basic blocks, first stride 2      256x8x8     6,822,400
    3 basic blocks, first stride 2      512x4x4     13,114,368
    global average pooling              512
    linear                              10          5,130
    ==================================  ==========  ===============

    Weights start as in torchvision (He et al., fan-out), the new stem included.

    Args:
        num_classes: M, at least 2.
        input_shape: (channels, height, width) of one image; any size, 32x32 is the paper's.

    Raises:
        ConfigurationError: fewer than two classes, or no image shape.

    Example:
        >>> network = resnet34_small(num_classes=7, input_shape=(3, 28, 28))
        >>> network.conv1
        Conv2d(3, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
        >>> network.fc
        Linear(in_features=512, out_features=7, bias=True)
    """
    check_num_classes("resnet34_small", num_classes)
    channels, _, _ = image_shape("resnet34_small", input_shape)
    network = resnet34(num_classes=num_classes)
    network.conv1 = nn.Conv2d(channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.maxpool = nn.Identity()
    return network
