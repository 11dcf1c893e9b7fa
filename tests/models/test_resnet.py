import pytest
import torch
from torch import nn

from flsv.errors import ConfigurationError
from flsv.models import resnet34_small


def test_parameters_by_hand(check_network):
    stem = 3 * 9 * 64 + 128
    blocks, before = 0, 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        blocks += before * 9 * width + width * 9 * width + 4 * width  # two convolutions, two batch normalizations
        blocks += before * width + 2 * width if before != width else 0  # the shortcut's projection
        blocks += (count - 1) * (2 * width * 9 * width + 4 * width)
        before = width
    parameters = stem + blocks + 513 * 10
    assert parameters == 21_282_122
    network = resnet34_small()
    check_network(network, 10, (3, 32, 32), parameters)
    running = [buffer for buffer in network.buffers() if buffer.is_floating_point()]
    assert sum(buffer.numel() for buffer in running) == 17_024


def test_the_stem_keeps_the_image_size():
    network = resnet34_small(7, (1, 28, 28)).eval()
    sizes = []
    network.layer1.register_forward_hook(lambda module, args, out: sizes.append(tuple(out.shape)))
    with torch.no_grad():
        assert network(torch.rand(2, 1, 28, 28)).shape == (2, 7)
    assert sizes == [(2, 64, 28, 28)]
    assert isinstance(network.fc, nn.Linear)


def test_the_new_stem_starts_like_torchvisions():
    torch.manual_seed(0)
    # He initialization, fan-out: variance 2 / (64 * 9).
    assert resnet34_small().conv1.weight.std().item() == pytest.approx((2 / 576) ** 0.5, rel=0.1)


@pytest.mark.parametrize("wrong", [{"num_classes": 1}, {"input_shape": (3072,)}])
def test_wrong_arguments(wrong):
    with pytest.raises(ConfigurationError, match="resnet34_small"):
        resnet34_small(**wrong)
