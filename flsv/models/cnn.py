"""Convolutional networks from papers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from annotated_types import Ge
from torch import Tensor, nn

from flsv.models.linear import Classes, Shape, dense_stack, image_shape, pooled_positions
from flsv.utilities.declared import Count, checked


def conv_stack(
    channels: Sequence[int],
    kernel: int,
    padding: int,
    batch_norm: bool = False,
) -> nn.Sequential:
    """Build a stack of stride-1 convolutions, each followed by ReLU and 2x2 max-pooling."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        layers.append(nn.Conv2d(inputs, outputs, kernel, padding=padding))
        if batch_norm:
            layers.append(nn.BatchNorm2d(outputs))
        # Pooling first would give the same values and gradients, but a training step measured 10 % slower on a CPU.
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers)


class ConvNet(nn.Module):
    """Base class of image classifiers: convolutions, then a classifier of their flattened output."""

    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits ``[B, M]`` of images ``[B, C, H, W]``."""
        features = self.features(x).flatten(1)
        return self.classifier(features)


@checked
class LeNet5(ConvNet):
    """LeNet-5 and smaller variants: two 5x5 convolutions, then fully connected layers.

    LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 86(11), 1998.
    This is today's usual form: ReLU and max-pooling replace scaled tanh and trainable subsampling, every map of the
    second convolution is connected to every map of the first, and a linear layer with softmax replaces RBF units.

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
        num_classes: number of classes M, at least 2.
        input_shape: (channels, height, width) of one image, at least 16x16 without padding, 4x4 with ``padding=2``.
        channels: output channels of each convolution, at least one.
        hidden: widths of the fully connected layers before the classifier.
        padding: zeros added on every side by both convolutions.

    Raises:
        ConfigurationError: there are fewer than two classes or no convolutions, the shape is not that of an image, or
            images are too small.

    Example:
        >>> import torch
        >>> LeNet5(num_classes=100, input_shape=(3, 32, 32))(torch.rand(5, 3, 32, 32)).shape
        torch.Size([5, 100])
        >>> sum(p.numel() for p in LeNet5(channels=(10, 20), hidden=(50,)).parameters())
        21840
    """

    def __init__(
        self,
        num_classes: Classes = 10,
        input_shape: Shape = (1, 28, 28),
        channels: Sequence[Count] = (6, 16),
        hidden: Sequence[Count] = (120, 84),
        padding: Annotated[int, Ge(0)] = 0,
    ) -> None:
        hint = ""
        if not padding:
            hint = ", pass padding=2 (network_args: {padding: 2})"
        layers = [(5, padding)] * len(channels)  # kernel and padding of each convolution
        num_positions = pooled_positions("LeNet5", input_shape, layers, hint)
        features = conv_stack(channels=[input_shape[0], *channels], kernel=5, padding=padding)
        num_features = channels[-1] * num_positions
        classifier = dense_stack([num_features, *hidden, num_classes])
        super().__init__(features, classifier)


@checked
class McMahanCNN(ConvNet):
    """The CNN of the FedAvg paper: two padded 5x5 convolutions and one wide fully connected layer.

    McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
    Decentralized Data", AISTATS 2017, sec. 3: "A CNN with two 5x5 convolution layers (the first with 32 channels, the
    second with 64, each followed with 2x2 max pooling), a fully connected layer with 512 units and ReLu activation, and
    a final softmax output layer (1,663,370 total parameters)." That number holds for padded convolutions only. The
    paper does not name the activation after the convolutions, which is ReLU here. pFedSV (Wu et al.) uses the same
    network on all its data sets.

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
        num_classes: number of classes M, at least 2.
        input_shape: (channels, height, width) of one image, at least 4x4.

    Raises:
        ConfigurationError: there are fewer than two classes, the shape is not that of an image, or images are too
            small.

    Example:
        >>> sum(p.numel() for p in McMahanCNN().parameters())
        1663370
    """

    def __init__(
        self,
        num_classes: Classes = 10,
        input_shape: Shape = (1, 28, 28),
    ) -> None:
        layers = [(5, 2)] * 2  # kernel and padding of each convolution
        num_positions = pooled_positions("McMahanCNN", input_shape, layers)
        channels = [input_shape[0], 32, 64]
        features = conv_stack(channels, kernel=5, padding=2)
        classifier = dense_stack([64 * num_positions, 512, num_classes])
        super().__init__(features, classifier)


@checked
class ShapFedCNN(ConvNet):
    """ShapFed's network for chest X-rays: three padded 3x3 convolutions, then three fully connected layers.

    Tastan, Fares, Aremu, Horváth, Nandakumar, "Redefining Contributions: Shapley-Driven Federated Learning", IJCAI
    2024, sec. 5.2: "a custom CNN architecture with three convolution layers followed by three fully connected layers.
    All the layers (except the last) are followed by ReLU activation." Neither the paper nor the authors' published code
    gives widths, kernels and pooling. The choice here is the plainest one: padded 3x3 convolutions that double the
    channels, 2x2 max-pooling after each, and LeNet-5's fully connected layers.

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
        num_classes: number of classes M, at least 2.
        input_shape: (channels, height, width) of one image, at least 8x8.

    Raises:
        ConfigurationError: there are fewer than two classes, the shape is not that of an image, or images are too
            small.

    Example:
        >>> sum(p.numel() for p in ShapFedCNN().parameters())
        102870
    """

    def __init__(
        self,
        num_classes: Classes = 2,
        input_shape: Shape = (1, 28, 28),
    ) -> None:
        layers = [(3, 1)] * 3  # kernel and padding of each convolution
        num_positions = pooled_positions("ShapFedCNN", input_shape, layers)
        features = conv_stack([input_shape[0], 16, 32, 64], kernel=3, padding=1)
        classifier = dense_stack([64 * num_positions, 120, 84, num_classes])
        super().__init__(features, classifier)


@checked
class ShapleyFLFashionCNN(ConvNet):
    """ShapleyFL's network for Fashion-MNIST: two padded 5x5 convolutions with batch normalization.

    Sun, Xiong, Li, Liu, Zhang, Liu, Qin, Ren, "ShapleyFL: Robust Federated Learning Based on Shapley Value", KDD 2023.
    The paper does not describe the layers of its "FMNIST-CNN" (Table 3), so they are those of the authors' published
    code. That code ends in log-softmax. Here the network returns logits, and their cross-entropy is the same loss.

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
        num_classes: number of classes M, at least 2.
        input_shape: (channels, height, width) of one image, at least 4x4.

    Raises:
        ConfigurationError: there are fewer than two classes, the shape is not that of an image, or images are too
            small.

    Example:
        >>> sum(p.numel() for p in ShapleyFLFashionCNN().parameters())
        29034
    """

    def __init__(
        self,
        num_classes: Classes = 10,
        input_shape: Shape = (1, 28, 28),
    ) -> None:
        layers = [(5, 2)] * 2  # kernel and padding of each convolution
        num_positions = pooled_positions("ShapleyFLFashionCNN", input_shape, layers)
        features = conv_stack(
            channels=[input_shape[0], 16, 32], kernel=5, padding=2, batch_norm=True
        )
        classifier = nn.Linear(32 * num_positions, num_classes)
        super().__init__(features, classifier)


@checked
class ShapleyFLCifarCNN(ConvNet):
    """ShapleyFL's network for CIFAR-10: two padded 3x3 convolutions and two linear layers with dropout.

    The layers are those of the authors' published code, as for :class:`ShapleyFLFashionCNN`.

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
        num_classes: number of classes M, at least 2.
        input_shape: (channels, height, width) of one image, at least 4x4.

    Raises:
        ConfigurationError: there are fewer than two classes, the shape is not that of an image, or images are too
            small.

    Example:
        >>> sum(p.numel() for p in ShapleyFLCifarCNN().parameters())
        1059306
    """

    def __init__(
        self,
        num_classes: Classes = 10,
        input_shape: Shape = (3, 32, 32),
    ) -> None:
        layers = [(3, 1)] * 2  # kernel and padding of each convolution
        num_positions = pooled_positions("ShapleyFLCifarCNN", input_shape, layers)
        channels = [input_shape[0], 16, 32]
        features = conv_stack(channels, kernel=3, padding=1)
        widths = [32 * num_positions, 512, num_classes]
        classifier = dense_stack(widths, dropout=0.2)
        super().__init__(features, classifier)


@checked
def resnet34_small(num_classes: Classes = 10, input_shape: Shape = (3, 32, 32)) -> nn.Module:
    """Build torchvision's ResNet-34 for small images, with a 3x3 stride-1 stem and no max-pooling.

    He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, table 1. ShapFed (Tastan et al.,
    IJCAI 2024, sec. 5.2) uses "the ResNet-34 architecture" for CIFAR-10. The original stem would shrink a 32x32 image
    to 8x8 before the first block. As in the authors' published code, a 3x3 convolution of stride 1 without max-pooling
    replaces it.

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

    Weights start as in torchvision (He et al., fan-out), the new stem included. The head is ``fc``.

    Args:
        num_classes: number of classes M, at least 2.
        input_shape: (channels, height, width) of one image, of any size. ShapFed has 32x32.

    Raises:
        ConfigurationError: there are fewer than two classes, or the shape is not that of an image.

    Example:
        >>> network = resnet34_small(num_classes=7, input_shape=(3, 28, 28))
        >>> network.conv1
        Conv2d(3, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
        >>> network.fc
        Linear(in_features=512, out_features=7, bias=True)
    """
    from torchvision.models import resnet34

    channels, _, _ = image_shape("resnet34_small", input_shape)
    network = resnet34(num_classes=num_classes)
    network.conv1 = nn.Conv2d(channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.maxpool = nn.Identity()
    return network
