"""Models trained side by side against the same models trained one after the other."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flsv.vmap.engine import ELEMENTWISE
from flsv.vmap.row_training import RowTraining, clip
from helpers.models import make_sgd

#: Steps of every model, and the size of its last batch.
STEPS = [(3, 8), (5, 8), (5, 3), (1, 8), (4, 3), (2, 3)]


class Step(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch):
        return (self.net(batch) - 1).square().mean()


class Decayed(Step):
    """The first weight is in the loss twice, once by itself."""

    def training_step(self, batch):
        return super().training_step(batch) + self.net[0].weight.square().sum()


class Penalized(Step):
    """A gradient by the inputs is in the loss."""

    def training_step(self, batch):
        slope = torch.func.grad(lambda x: self.net(x).square().mean())(batch)
        return super().training_step(batch) + slope.square().sum()


def make_mlp(*between):
    return nn.Sequential(
        nn.Linear(4, 8),
        *between,
        nn.Tanh(),
        nn.Linear(8, 3),
    )


class Tied(nn.Module):
    """One weight in two layers, and once as a bare tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.layer.weight

    def forward(self, x):
        return nn.functional.linear(
            x @ self.tied.weight.T,
            weight=self.layer.weight,
        ) + self.tied(self.layer(x))


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0][:, -1]


class OneVector(nn.Linear):
    def forward(self, x):
        return super().forward(x[0])


class Counting(nn.Module):
    """Puts a new tensor in its buffer's place, and writes into the other."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("input_sum", torch.zeros(4))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.input_sum = self.input_sum + x.sum(0)
        self.steps += 1
        return x * self.weight + self.input_sum


Make = Callable[[Any], torch.optim.Optimizer]


def make_two_groups(parameters):
    weight, *others_parameters = parameters
    return torch.optim.SGD(
        [
            {"params": [weight], "lr": 0.01},
            {"params": others_parameters, "momentum": 0.9},
        ],
        lr=0.1,
    )


def make_optimizer(name):
    return lambda parameters: getattr(torch.optim, name)(parameters)


@dataclass
class Case:
    """A module, the shape of a sample, an optimizer, and the largest norm of a gradient."""

    module: Callable[[], nn.Module] = make_mlp
    shape: tuple[int, ...] = (4,)
    optimizer: Make = field(default_factory=make_sgd)
    limit: float | None = None


CASES = {
    **{name: Case(optimizer=make_optimizer(name)) for name in ELEMENTWISE},
    "nesterov": Case(
        optimizer=make_sgd(
            momentum=0.9,
            nesterov=True,
            weight_decay=0.01,
        )
    ),
    "AMSGrad": Case(optimizer=partial(torch.optim.Adam, amsgrad=True, weight_decay=0.01)),
    "accumulators that are not 0": Case(
        optimizer=partial(torch.optim.Adagrad, initial_accumulator_value=0.5)
    ),
    "foreach": Case(optimizer=partial(torch.optim.AdamW, foreach=True)),
    "groups": Case(optimizer=make_two_groups),
    "norms that are clipped": Case(limit=0.2),
    "norms that are small": Case(limit=100.0),
    "batch norm": Case(lambda: make_mlp(nn.BatchNorm1d(8))),
    "a weight in the loss": Case(lambda: Decayed(make_mlp())),
    "a gradient in the loss": Case(lambda: Penalized(make_mlp())),
    "linear of sequences": Case(lambda: nn.Linear(4, 3), (6, 4)),
    "linear of one vector": Case(lambda: OneVector(4, 3, bias=False)),
    "tied": Case(Tied),
    "convolution": Case(lambda: nn.Conv2d(2, 3, 3), (2, 4, 4)),
    "attention": Case(
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (3, 4)
    ),
    "recurrent": Case(lambda: Recurrent(4, 3, batch_first=True), (3, 4)),
    "buffers": Case(Counting, optimizer=make_sgd(lr=0.001)),
}


def make_setting(name):
    """The module, a state of each model with a row per model, and the batches of each model."""
    torch.manual_seed(0)
    case = CASES[name]
    net = case.module()
    module = net if isinstance(net, Step) else Step(net)
    num_models = len(STEPS)

    def make_states(tensor):
        """Different values for every model, ``[num_models, ...]``."""
        if not tensor.is_floating_point():
            return torch.arange(num_models) + tensor
        return tensor + 0.1 * torch.rand(num_models, *tensor.shape)

    states = {}
    tensors = (*module.named_parameters(), *module.named_buffers())
    for tensor_name, tensor in tensors:
        states[tensor_name] = make_states(tensor.detach())

    batches = []
    for num_steps, last_size in STEPS:
        sizes = [8] * (num_steps - 1) + [last_size]
        batches.append([torch.randn(size, *case.shape) for size in sizes])

    return module, states, batches


def train_one_by_one(
    module,
    states,
    batches_by_model,
    make,
    limit,
):
    for i, batches in enumerate(batches_by_model):
        model = copy.deepcopy(module)
        model.load_state_dict(
            {name: tensor[i] for name, tensor in states.items()},
            strict=False,
        )
        optimizer = make(model.parameters())
        total = 0.0
        for batch in batches:
            optimizer.zero_grad()
            loss = model.training_step(batch)
            loss.backward()
            if limit is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            total += loss.item()
        yield model.state_dict(), total / len(batches)


@pytest.mark.parametrize("name", CASES)
def test_batched_training_of_models_equals_training_each_model_alone(name):
    module, states, batches = make_setting(name)
    case = CASES[name]
    shortened = None if case.limit is None else partial(clip, limit=case.limit)
    initial_state = copy.deepcopy(module.state_dict())
    optimizer = case.optimizer(module.parameters())
    initial_optimizer = str(optimizer.state_dict())
    initial_states = {key: tensor.clone() for key, tensor in states.items()}

    training = RowTraining(module, optimizer, shortened)
    trained, losses = training.train(initial_states, batches)

    expected = train_one_by_one(module, states, batches, case.optimizer, case.limit)
    for i, (model, loss) in enumerate(expected):
        for key, tensor in trained.items():
            torch.testing.assert_close(
                tensor[i],
                model[key],
                rtol=1e-5,
                atol=1e-5,
            )
        assert losses[i].item() == pytest.approx(loss, rel=1e-5)
    assert str(optimizer.state_dict()) == initial_optimizer
    for key, value in module.state_dict().items():
        assert torch.equal(value, initial_state[key])
