"""Checks input shapes before a network is built."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from flsv.errors import ConfigurationError


def check_num_classes(network: str, num_classes: int) -> None:
    """Raise :class:`~flsv.errors.ConfigurationError` unless there are at least two classes."""
    if num_classes < 2:
        raise ConfigurationError(
            f"{network}: num_classes={num_classes}, but a classifier needs at least 2 classes. "
            "A yes/no question has num_classes=2, one logit for each answer."
        )


def flat_size(network: str, input_shape: Sequence[int]) -> int:
    """Number of values in one sample, for networks that flatten their input.

    Args:
        network: name for the error message.
        input_shape: one sample's shape, any number of dimensions, without the batch.

    Raises:
        ConfigurationError: a dimension is missing or not positive.

    Example:
        >>> flat_size("MLP", (1, 28, 28))
        784
    """
    if len(input_shape) == 0 or min(input_shape) < 1:
        raise ConfigurationError(
            f"{network}: input_shape={tuple(input_shape)} is no sample's shape. "
            "Give the positive sizes of one sample without the batch, such as (1, 28, 28) or (30,)."
        )
    return math.prod(input_shape)


def image_shape(network: str, input_shape: Sequence[int]) -> tuple[int, int, int]:
    """``input_shape`` as (channels, height, width).

    Raises:
        ConfigurationError: not three positive numbers.

    Example:
        >>> image_shape("LeNet5", [3, 32, 32])
        (3, 32, 32)
    """
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ConfigurationError(
            f"{network}: input_shape={tuple(input_shape)} is no image's shape. Give (channels, height, width), "
            "such as (1, 28, 28), or use 'mlp' or 'softmax', which take samples of any shape."
        )
    channels, height, width = input_shape
    return channels, height, width


def pooled_positions(
    network: str, input_shape: Sequence[int], layers: Sequence[tuple[int, int]], hint: str = ""
) -> int:
    """Height times width after a stack of stride-1 convolutions, each followed by a 2x2 max-pooling.

    Args:
        network: name for the error message.
        input_shape: (channels, height, width) of one image.
        layers: (kernel, padding) of each convolution.
        hint: what to do about an image that is too small, added to the error message.

    Raises:
        ConfigurationError: no convolutions, or nothing is left of the image after the last pooling.

    Example:
        >>> pooled_positions("LeNet5", (1, 28, 28), [(5, 0), (5, 0)])
        16
    """

    def after(side: int) -> int:
        for kernel, padding in layers:
            side = max(side + 2 * padding - kernel + 1, 0) // 2
        return side

    _, height, width = image_shape(network, input_shape)
    if not layers:
        raise ConfigurationError(f"{network}: channels is empty. Give the output channels of at least one convolution.")
    positions = after(height) * after(width)
    if positions == 0:
        smallest = next(side for side in range(1, 10_000) if after(side) > 0)
        raise ConfigurationError(
            f"{network}: images of {height}x{width} are too small for its {len(layers)} convolutions and poolings, "
            f"which need at least {smallest}x{smallest}. Enlarge the images{hint}, or use 'mlp'."
        )
    return positions


def check_output(network: nn.Module, name: str, num_classes: int, input_shape: Sequence[int]) -> None:
    """Run two blank samples through ``network`` and check that ``[2, num_classes]`` logits come out.

    Costs one small forward pass in evaluation mode without gradients and draws no random numbers, so that a wrong image
    size or head is found before the first round.

    Args:
        network: any module; its training mode is left as it was.
        name: name for the error message.
        num_classes: logits expected for each sample.
        input_shape: shape of one sample, without the batch.

    Raises:
        ConfigurationError: the forward pass fails, or its result is not ``[2, num_classes]``.

    Example:
        >>> check_output(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "mine", num_classes=10, input_shape=(1, 8, 8))
    """
    like = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(0))
    blank = torch.zeros(2, *input_shape, dtype=like.dtype, device=like.device)
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch.no_grad():
            logits = network(blank)
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
        raise ConfigurationError(
            f"{name} cannot process samples of shape {tuple(input_shape)}: {error} "
            "Resize the images to what it expects, choose another network, or, for a timm transformer, "
            "pass its image size (network_args: {img_size: 28})."
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if found != (2, num_classes):
        raise ConfigurationError(
            f"{name} returns {found} for 2 samples of shape {tuple(input_shape)}, but {(2, num_classes)} logits were "
            f"expected: one for each of the {num_classes} classes. Change its last layer, or num_classes."
        )
