"""A small network, a round of it, and the naive way: average, load, predict, scikit-learn."""

import copy
import itertools
import warnings
from typing import Any

import torch
from sklearn import metrics as sk
from torch import Tensor, nn

from flsv.core import Round
from flsv.core.parameter_space import ParameterSpace
from flsv.games import Renormalized

CLASSES = 4


class Net(nn.Module):
    """Convolution, BatchNorm, dropout, and buffers that a vector does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4 * 16, CLASSES)
        self.register_buffer("scale", torch.tensor(1.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.conv(x)).relu()).flatten(1)) * self.scale


def module() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batches(samples: int = 70, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 1, 6, 6, generator=generator)
    y = torch.randint(CLASSES, (samples,), generator=generator)
    return list(zip(x.split(size), y.split(size)))


def a_round(net: nn.Module, own_starts: bool = False) -> Round:
    space, clients = ParameterSpace(net), 4
    generator = torch.Generator().manual_seed(7)

    def models(like: Tensor) -> Tensor:
        noise = torch.randn(clients, space.size, generator=generator)
        noise[:, space.num_parameters :] = noise[:, space.num_parameters :].abs()  # a running variance is positive
        return like + 0.3 * noise

    start = space.read(net)
    starts = models(start) if own_starts else None
    return Round(
        round_index=0,
        client_ids=torch.arange(clients),
        num_samples=torch.randint(5, 50, (clients,), generator=generator),
        global_vector=start,
        client_vectors=models(start if starts is None else starts),
        space=space,
        starts=None if starts is None else list(starts),
    )


MASKS = torch.tensor(list(itertools.product([False, True], repeat=4)))


def coalition_weights(round: Round, mask: Tensor, weighting: Any) -> tuple[dict[int, float], dict[int, float]]:
    """The members' weights in parameters and in buffers, in plain Python."""
    members = mask.nonzero().flatten().tolist()
    if not isinstance(weighting, str):
        given = weighting.weights if isinstance(weighting, Renormalized) else weighting
        raw = {i: float(given[i]) for i in members}
    else:
        raw = {i: float(round.num_samples[i]) if weighting == "samples" else 1.0 for i in members}
    total = sum(raw.values())
    shares = {i: w / total for i, w in raw.items()}
    return (raw if isinstance(weighting, Tensor) else shares), shares


def naive_model(net: nn.Module, round: Round, mask: Tensor, weighting: Any, server_lr: float = 1.0) -> nn.Module:
    """The coalition's model by averaging state_dicts entry by entry, in double precision."""
    model = copy.deepcopy(net).eval()
    if not mask.any():
        return model
    parts = {i: round.space.unflatten(round.client_vectors[i]) for i in range(len(round))}
    starts = {i: round.space.unflatten(round.matrix.starts[i]) for i in range(len(round))}
    weights, shares = coalition_weights(round, mask, weighting)
    state = model.state_dict()
    parameters = dict(model.named_parameters())
    for name, value in state.items():
        if name in parameters:
            moves = [w * (parts[i][name].double() - starts[i][name].double()) for i, w in weights.items()]
            state[name] = (value.double() + server_lr * sum(moves)).float()
        elif value.is_floating_point():
            state[name] = sum(w * parts[i][name].double() for i, w in shares.items()).float()
    model.load_state_dict(state)
    return model


@torch.no_grad()
def naive_scores(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    logits = torch.cat([model(x) for x, _ in data])
    y = torch.cat([y for _, y in data]).numpy()
    predicted = logits.argmax(-1).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes without samples
        return {
            "accuracy": sk.accuracy_score(y, predicted),
            "balanced_accuracy": sk.balanced_accuracy_score(y, predicted),
            "negative_loss": -sk.log_loss(y, logits.double().softmax(-1).numpy(), labels=range(CLASSES)),
            "per_class_accuracy": sk.recall_score(y, predicted, labels=range(CLASSES), average=None, zero_division=0),
            "f1": sk.f1_score(y, predicted, labels=range(CLASSES), average="macro"),
        }


FIXED = torch.tensor([0.5, 0.1, 0.0, 0.7])
