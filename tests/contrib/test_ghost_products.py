"""Ghost dot products against gradients of single samples by torch.func."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad

from flsv.contrib._ghost_products import GhostProducts
from helpers import refused

BATCH_SIZE = 5


class Last(nn.Module):
    """Logits of three classes from whatever comes."""

    def forward(self, x):
        return x.flatten(1)[:, :3].sin()


class Twice(nn.Module):
    """One layer's weights in two places."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.layer.weight

    def forward(self, x):
        return self.tied(self.layer(self.layer(x)).relu())


def draw_floats(*shape):
    return lambda: torch.randn(BATCH_SIZE, *shape, dtype=torch.float64)


def draw_words():
    return torch.randint(0, 6, (BATCH_SIZE, 4))


MODULES = {
    "linear": (
        lambda: nn.Sequential(
            nn.Linear(4, 6),
            nn.ReLU(inplace=True),
            nn.Linear(6, 3, bias=False),
        ),
        draw_floats(4),
    ),
    "linear on tokens": (
        lambda: nn.Sequential(
            nn.Linear(4, 5),
            nn.Tanh(),
            nn.Linear(5, 3),
        ),
        draw_floats(7, 4),
    ),
    "conv2d": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, dilation=2),
            nn.ReLU(),
            nn.Conv2d(4, 3, 2, padding=1, padding_mode="circular"),
        ),
        draw_floats(2, 9, 9),
    ),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), draw_floats(2, 3, 3)),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(6, 3, padding_idx=0), nn.Flatten(), nn.Linear(12, 3)),
        draw_words,
    ),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), draw_floats(4)),
    "rms norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6)), draw_floats(4)),
    "instance norm": (lambda: nn.InstanceNorm2d(2, affine=True), draw_floats(2, 3, 3)),
    "batch norm that rests": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).eval()),
        draw_floats(4),
    ),
    "tied": (Twice, draw_floats(4)),
}


def make_setting(name):
    """A module, a batch (x, y), and a direction: a tensor for each parameter."""
    torch.manual_seed(1)
    make, inputs = MODULES[name]
    module = nn.Sequential(make(), Last()).double()
    direction = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    return module, inputs(), torch.arange(BATCH_SIZE) % 3, direction


def products_one_by_one(module, x, y, direction):
    """The inner product of the direction with the gradient of each sample's own loss."""
    parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}

    def loss(parameters, x, y):
        return F.cross_entropy(
            functional_call(module, parameters, (x[None],)),
            y[None],
        )

    products = []
    for sample in range(len(x)):
        gradient = grad(loss)(parameters, x[sample], y[sample])
        names = [name for name in gradient if name in direction]
        products.append(sum((gradient[name] * direction[name]).sum() for name in names))
    return torch.stack(products)


@pytest.mark.parametrize("name", MODULES)
def test_ghost_products_of_every_layer_equal_those_of_per_sample_gradients(name):
    module, x, y, direction = make_setting(name)
    # The batch's loss is a mean, in which a sample's loss counts 1 / BATCH_SIZE.
    expected = products_one_by_one(module, x, y, direction) / BATCH_SIZE
    ghost = GhostProducts(module, direction)
    ghost.watch(BATCH_SIZE)

    F.cross_entropy(module(x), y).backward()
    products = ghost.take()

    torch.testing.assert_close(products, expected)
    assert expected.abs().max() > 1e-3
    # The samples' gradients add up to the batch's.
    product_of_batch = 0
    for parameter_name, parameter in module.named_parameters():
        product_of_batch += (parameter.grad * direction[parameter_name]).sum()
    torch.testing.assert_close(products.sum(), product_of_batch)


def test_ghost_products_ignore_parameters_frozen_or_missing_in_the_direction():
    # Parameters: the first layer's weight and bias, and the last one's weight.
    module, x, y, direction = make_setting("linear")
    frozen = "0.0.weight"
    missing = "0.2.weight"
    remaining = "0.0.bias"
    module.get_parameter(frozen).requires_grad_(False)
    del direction[missing]
    expected = products_one_by_one(module, x, y, {remaining: direction[remaining]})
    ghost = GhostProducts(module, direction)
    ghost.watch(BATCH_SIZE)

    F.cross_entropy(module(x), y, reduction="sum").backward()

    torch.testing.assert_close(ghost.take(), expected)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "'1', BatchNorm1d, mixes the samples"),
        (
            nn.MultiheadAttention(4, 2),
            "'in_proj_weight' is MultiheadAttention's, for which there is no ghost",
        ),
        (nn.Embedding(4, 4, sparse=True), "sparse"),
        (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), "track_running_stats"),
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "parametrizations.weight.original0",
        ),
    ],
)
def test_layers_without_a_ghost_product_are_named(module, says):
    with refused(says):
        GhostProducts(module, {name: p.detach() for name, p in module.named_parameters()})


def test_ghost_products_of_rows_that_are_not_samples_are_refused():
    """Tokens one by one, without a dimension of the batch."""
    module = nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 3))
    ghost = GhostProducts(module, {name: p.detach() for name, p in module.named_parameters()})
    ghost.watch(BATCH_SIZE)
    with refused("a batch of 5 samples"):
        module(torch.randn(BATCH_SIZE, 7, 4))


@pytest.mark.parametrize("name", ["tied", "conv2d", "embedding"])
def test_ghost_products_over_several_batches_equal_those_of_per_sample_gradients(name):
    """The data's buffer is overwritten for every batch, a batch is not watched, and one comes by without a pass."""
    module, x, y, validation_gradient = make_setting(name)
    ghost = GhostProducts(module, validation_gradient)
    buffer = torch.empty_like(x)
    expected = []

    def load_batch():
        ghost.remove()
        buffer.copy_(x.roll(len(expected), 0))

    def pass_batch(size):
        loss = F.cross_entropy(
            module(buffer[:size]),
            y[:size],
            reduction="sum",
        )
        loss.backward()

    def pass_watched_batch(size):
        load_batch()
        inputs = buffer[:size].clone()
        expected.append(products_one_by_one(module, inputs, y[:size], validation_gradient))
        ghost.watch(size)
        pass_batch(size)

    pass_watched_batch(BATCH_SIZE)
    # A batch that is not watched.
    load_batch()
    pass_batch(BATCH_SIZE)
    pass_watched_batch(3)
    # A batch that comes by without a pass.
    ghost.remove()
    ghost.watch(2)
    expected.append(torch.zeros(2, dtype=torch.float64))
    pass_watched_batch(BATCH_SIZE)

    torch.testing.assert_close(ghost.take(), torch.cat(expected))
    assert len(ghost.take()) == 0
