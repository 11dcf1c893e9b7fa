import torch
import torch.nn.functional as F
from torch import nn

from flsv.models.cnn import conv_stack
from flsv.models.linear import dense_stack


def test_conv_stack_written_out():
    torch.manual_seed(0)
    stack = conv_stack([1, 4, 6], kernel=3, padding=1)
    first, second = (layer for layer in stack if isinstance(layer, nn.Conv2d))
    x = torch.randn(5, 1, 12, 12)
    expected = F.max_pool2d(F.relu(F.conv2d(x, first.weight, first.bias, padding=1)), 2)
    expected = F.max_pool2d(F.relu(F.conv2d(expected, second.weight, second.bias, padding=1)), 2)
    torch.testing.assert_close(stack(x), expected)


def test_batch_norm_follows_each_convolution():
    kinds = [type(layer) for layer in conv_stack([1, 4, 6], kernel=5, padding=2, batch_norm=True)]
    assert kinds == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d] * 2


def test_dense_stack_ends_in_the_head():
    kinds = [type(layer) for layer in dense_stack([8, 6, 4])]
    assert kinds == [nn.Linear, nn.ReLU, nn.Linear]


def test_dense_stack_with_dropout_before_each_layer():
    stack = dense_stack([8, 6, 4], dropout=0.2)
    assert [type(layer) for layer in stack] == [nn.Dropout, nn.Linear, nn.ReLU, nn.Dropout, nn.Linear]
    assert stack[0].p == stack[3].p == 0.2
