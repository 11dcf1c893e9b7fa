"""Softmax regression, multi-layer perceptron and fastText, and functions that check shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn

from flsv.utilities.declared import Count, checked
from flsv.utilities.errors import ConfigurationError

Classes = Annotated[int, Ge(2), "Binary classification has num_classes=2, one logit per class."]
Shape = Annotated[
    Sequence[Count], "One sample's shape without the batch, such as (1, 28, 28) or (30,)."
]


def flat_size(network: str, input_shape: Sequence[int]) -> int:
    """Return the number of values in a sample of shape ``input_shape``."""
    if not input_shape:
        raise ConfigurationError(
            f"{network}: input_shape=() has no dimension. Set the shape of one sample, such as (30,)."
        )
    return math.prod(input_shape)


def image_shape(network: str, input_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return ``input_shape`` as a tuple (channels, height, width)."""
    if len(input_shape) != 3:
        raise ConfigurationError(
            f"{network}: input_shape={tuple(input_shape)} is not the shape of an image. Set (channels, height, width), "
            "such as (1, 28, 28), or use 'mlp' or 'softmax', which take samples of any shape."
        )
    channels, height, width = input_shape
    return channels, height, width


def pooled_positions(
    network: str, input_shape: Sequence[int], layers: Sequence[tuple[int, int]], hint: str = ""
) -> int:
    """Return height times width of the output of convolutions with 2x2 max-pooling.

    ``layers`` are the ``(kernel, padding)`` of each stride-1 convolution.
    """

    def side_after_pooling(side: int) -> int:
        for kernel, padding in layers:
            convolved = side + 2 * padding - kernel + 1
            side = max(convolved, 0) // 2
        return side

    _, height, width = image_shape(network, input_shape)
    positions = side_after_pooling(height) * side_after_pooling(width)
    if positions == 0:
        smallest = 1
        while side_after_pooling(smallest) == 0:
            smallest += 1
        raise ConfigurationError(
            f"{network}: images of {height}x{width} are too small for its {len(layers)} convolutions and poolings, "
            f"which need at least {smallest}x{smallest}. Enlarge the images{hint}, or use 'mlp'."
        )
    return positions


def check_output(
    network: nn.Module, name: str, num_classes: int, input_shape: Sequence[int]
) -> None:
    """Raise ConfigurationError unless ``network`` returns logits ``[2, num_classes]`` for two samples."""
    like = torch.empty(0)
    for parameter in network.parameters():
        if parameter.is_floating_point():
            like = parameter
            break
    blank = torch.zeros(2, *input_shape, dtype=like.dtype, device=like.device)
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch.no_grad():
            logits = network(blank)
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
        reason = str(error).rstrip(".")
        raise ConfigurationError(
            f"{name} cannot process samples of shape {tuple(input_shape)}: {reason}. "
            "Resize the images to what it expects, choose another network, or, for a timm transformer, "
            "pass its image size (network_args: {img_size: 28})."
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training

    output: object = type(logits).__name__
    if isinstance(logits, torch.Tensor):
        output = tuple(logits.shape)
    if output != (2, num_classes):
        raise ConfigurationError(
            f"{name} returns {output} for 2 samples of shape {tuple(input_shape)}, but {(2, num_classes)} logits were "
            f"expected: one for each of the {num_classes} classes. Change its last layer, or num_classes."
        )


def dense_stack(widths: Sequence[int], dropout: float = 0.0) -> nn.Sequential:
    """Build linear layers of these widths, with ReLU between them and dropout before each."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        if dropout:
            layers.append(nn.Dropout(dropout))
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])  # no ReLU after the last layer


@checked
class SoftmaxRegression(nn.Module):
    """Multinomial logistic regression, a model with a convex loss.

    ==========  =======================  ==========================
    layer       output                   parameters
    ==========  =======================  ==========================
    flatten     D = product of the shape
    linear      M                        D M + M
    ==========  =======================  ==========================

    7,850 parameters for 28x28 grey images and 10 classes.

    Args:
        num_classes: number of classes M, at least 2.
        input_shape: shape of one sample without the batch: (C, H, W) for images, (D,) for rows of a table.

    Raises:
        ConfigurationError: there are fewer than two classes, or the shape is invalid.

    Example:
        >>> import torch
        >>> SoftmaxRegression(num_classes=10, input_shape=(1, 8, 8))(torch.rand(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(self, num_classes: Classes = 10, input_shape: Shape = (1, 28, 28)) -> None:
        super().__init__()
        num_inputs = flat_size("SoftmaxRegression", input_shape)
        self.classifier = nn.Linear(num_inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits ``[B, M]`` of a batch ``[B, *input_shape]``."""
        return self.classifier(x.flatten(1))


@checked
class MLP(nn.Module):
    """Multi-layer perceptron with ReLU, by default the "2NN" of McMahan et al.

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
        num_classes: number of classes M, at least 2.
        input_shape: shape of one sample without the batch: (C, H, W) for images, (D,) for rows of a table.
        hidden: width of each hidden layer, or empty for softmax regression.

    Raises:
        ConfigurationError: there are fewer than two classes, or the shape is invalid.

    Example:
        >>> sum(p.numel() for p in MLP().parameters())
        199210
    """

    def __init__(
        self,
        num_classes: Classes = 10,
        input_shape: Shape = (1, 28, 28),
        hidden: Sequence[Count] = (200, 200),
    ) -> None:
        super().__init__()
        num_inputs = flat_size("MLP", input_shape)
        self.classifier = dense_stack([num_inputs, *hidden, num_classes])

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits ``[B, M]`` of a batch ``[B, *input_shape]``."""
        return self.classifier(x.flatten(1))


@checked
class FastText(nn.Module):
    """fastText: a linear layer on the mean of a text's word vectors.

    A text is given as the hashes of its words (:class:`flsv.tables.TextData`). Joulin, Grave, Bojanowski, Mikolov, "Bag
    of Tricks for Efficient Text Classification", EACL 2017, section 2. In the paper, n-grams are hashed and words have
    a vocabulary. Here words are hashed, there are no n-grams, and the softmax is not hierarchical.

    ==========  ==============  ===================
    layer       output          parameters
    ==========  ==============  ===================
    embedding   words x width   buckets x width
    mean        width
    linear      M               width M + M
    ==========  ==============  ===================

    A word with the hash h has the vector 1 + h mod (buckets - 1), so several words may share a vector. Zeros are
    padding, and do not count in the mean. A text without words has the zero vector.

    Args:
        num_classes: number of classes M, at least 2.
        input_shape: ``(words,)``, the number of hashes of a text.
        buckets: number of word vectors, at least 2.
        width: length of a word vector.

    Raises:
        ConfigurationError: there are fewer than two classes, or an option is out of range.

    Example:
        >>> import torch
        >>> FastText(8, (4,), buckets=100, width=16)(torch.tensor([[4122618561, 2587067636, 0, 0]])).shape
        torch.Size([1, 8])
    """

    def __init__(
        self,
        num_classes: Classes = 8,
        input_shape: Shape = (200,),
        buckets: Annotated[int, Ge(2)] = 4096,
        width: Count = 32,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise ConfigurationError(
                f"FastText: input_shape={tuple(input_shape)} is not the shape of a text. Set the number of a text's "
                "hashes, such as (200,)."
            )
        self.embedding = nn.Embedding(buckets, width, padding_idx=0)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, words: Tensor) -> Tensor:
        """Compute logits ``[B, M]`` of texts, given as hashes ``[B, words]``."""
        words = words.long()
        is_word = words > 0  # else padding
        # Row 0 is zero and belongs to padding, so that the sum is over words only. Words share the other rows.
        num_word_rows = self.embedding.num_embeddings - 1
        rows = (words % num_word_rows + 1) * is_word
        sums = self.embedding(rows).sum(1)
        counts = is_word.sum(1, keepdim=True).clamp(min=1)
        return self.classifier(sums / counts)
