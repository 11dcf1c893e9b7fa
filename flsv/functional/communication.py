"""What is sent: by an algorithm's rounds, and by pFedSV's dynamic top-k.

What an algorithm's rounds cost in parameters sent and received, by counting, without training.

Wu et al., "Rethinking Personalized Client Collaboration in Federated Learning", IEEE Transactions on Mobile Computing,
2024, section VI-C and figures 8-10. What the paper calls the classifier is the last linear layer in ResNet-34 with 1000
classes (2.35 %, the paper says 2.3 %), and must be all fully connected layers in VGG-19, where it says 89.74 %:
torchvision's VGG-19 has 86.06 % there (VGG-16 has 89.37 %). The 49.57 % that it gives for LeNet-5 are not those of any
split by layers of the usual LeNet-5: for (1, 28, 28) it is 94.2 % in all linear layers, 24.8 % in the last two and
1.9 % in the last. So the layers are named by whoever asks.

pFedSV's dynamic top-k: whose models a client downloads in this round.

Wu et al., "Rethinking Personalized Client Collaboration in Federated Learning", IEEE Transactions on Mobile Computing,
2024, section III-C ("Dynamic top-k download mechanism") and IV-B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Generator, Tensor, nn

from flsv.errors import ConfigurationError

Method = Literal["pfedsv", "pfedsv_d", "pfedsv_dc", "fedfomo", "fedamp", "fedavg"]


def classifier_size(module: nn.Module, layers: Sequence[str]) -> tuple[int, int]:
    """Parameters of a module and of those of its layers that make up the classifier.

    Args:
        module: the network.
        layers: names of layers as in ``module.named_modules()``.

    Returns:
        (all, the classifier's).

    Raises:
        ConfigurationError: there is no layer of that name, or it has no parameters.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> classifier_size(network, ["2"])
        (23, 8)
    """
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    missing = [layer for layer in layers if not any(name.startswith(f"{layer}.") for name in sizes)]
    if missing or not layers:
        raise ConfigurationError(
            f"classifier layers {list(layers)}: {missing} are no layers with parameters. There are "
            f"{sorted({name.rpartition('.')[0] for name in sizes})}."
        )
    prefixes = tuple(f"{layer}." for layer in layers)
    return sum(sizes.values()), sum(size for name, size in sizes.items() if name.startswith(prefixes))


def communication_parameters(
    method: Method, size: int, classifier: int, downloads: Tensor, k: int = 5
) -> tuple[Tensor, Tensor]:
    """Parameters that every client sends and receives in every round.

    Every method sends a model up. Down come, of models of P parameters with C of them in the classifier: ``"pfedsv"``
    and ``"fedfomo"``: k P; ``"pfedsv_d"``, with the dynamic top-k: k_t P; ``"pfedsv_dc"``, with a common extractor too:
    (P - C) + k_t C; ``"fedamp"`` and ``"fedavg"``: P.

    Args:
        method: which.
        size: P.
        classifier: C.
        downloads: ``[T, n]`` models that each client downloads in each round (k_t, of :func:`download_schedule`).
        k: models that a client downloads where their number does not change. FedFomo downloads as many as it is told;
            the paper does not say how many that was.

    Returns:
        up and down, int64 ``[T, n]`` each.

    Raises:
        ConfigurationError: an unknown method, or sizes out of range.

    Example:
        >>> downloads = torch.tensor([[5], [2]])
        >>> up, down = communication_parameters("pfedsv_dc", size=100, classifier=10, downloads=downloads)
        >>> up.flatten().tolist(), down.flatten().tolist()
        ([100, 100], [140, 110])
    """
    if method not in get_args(Method):
        raise ConfigurationError(f"method={method!r}: expected one of {get_args(Method)}.")
    if not 0 <= classifier <= size or k < 0:
        raise ConfigurationError(
            f"communication_parameters(size={size}, classifier={classifier}, k={k}): expected 0 <= classifier <= size "
            "and k not below 0."
        )
    downloads = downloads.long()
    whole = torch.full_like(downloads, size)
    down = {
        "pfedsv": k * whole,
        "pfedsv_d": downloads * size,
        "pfedsv_dc": (size - classifier) + downloads * classifier,
        "fedfomo": k * whole,
        "fedamp": whole,
        "fedavg": whole,
    }
    return whole, down[method]


def download_schedule(
    truth: Tensor, rounds: int, k: int = 5, explore: Explore = "score", generator: Generator | None = None
) -> Tensor:
    """How many models every client downloads in every round if a look at a model tells at once whether it is relevant.

    All clients take part in every round, and follow :func:`flsv.functional.top_k_download`.

    Args:
        truth: ``[n, n]``, above 0 where column's client is relevant to row's.
        rounds: T.
        k: downloads to start with.
        explore: as there.
        generator: of the order in which clients are looked at.

    Returns:
        int64 ``[T, n]``.

    Example:
        >>> truth = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2))
        >>> download_schedule(truth, rounds=4, k=2, generator=torch.Generator().manual_seed(0)).tolist()
        [[2, 2, 2, 2], [2, 2, 2, 2], [1, 1, 1, 1], [1, 1, 1, 1]]
    """
    n = len(truth)
    scores, available = torch.full((n, n), float("nan")), torch.ones(n, dtype=torch.bool)
    counts = torch.zeros(rounds, n, dtype=torch.long)
    for t in range(rounds):
        for client in range(n):
            ids = top_k_download(scores[client], available, client, k, explore, generator)
            counts[t, client] = len(ids)
            scores[client, ids] = torch.where(truth[client, ids].cpu() > 0, 1.0, -1.0)
    return counts


Explore = Literal["score", "unvisited"]


def check_explore(explore: str) -> None:
    """Raise ConfigurationError unless there is such a policy."""
    if explore not in get_args(Explore):
        raise ConfigurationError(f"explore={explore!r}: expected one of {get_args(Explore)}.")


def top_k_download(
    relevance: Tensor,
    available: Tensor,
    own: int,
    k: int,
    explore: Explore = "score",
    generator: Generator | None = None,
) -> Tensor:
    """The clients to download, best first.

    A client with a negative score is never downloaded again. While there is one that was never looked at, k clients
    are downloaded, by score, those never looked at counting as 0 and ties falling at random; afterwards as many as have
    a positive score, at least 1 (if anybody is left who is not negative).

    Args:
        relevance: ``[n]`` scores of all clients, NaN: never looked at.
        available: bool ``[n]``, whose model the server has.
        own: who downloads; never itself.
        k: downloads a round to start with, at least 1.
        explore: ``"score"`` is the above. ``"unvisited"`` gives the k places to those never looked at first, which
            keeps the paper's bound (:func:`flsv.functional.discovery_bound`) for any number of relevant clients.
        generator: of the ties.

    Returns:
        int64 ``[k']`` on the CPU, k' from 0 to n - 1.

    Raises:
        ConfigurationError: k below 1, an unknown ``explore``.
        ValueError: shapes that do not fit.

    Example:
        >>> nan = float("nan")
        >>> relevance = torch.tensor([nan, 0.3, -0.2, 0.1, nan])
        >>> top_k_download(relevance, torch.ones(5, dtype=torch.bool), own=0, k=3)
        tensor([1, 3, 4])
        >>> top_k_download(relevance.nan_to_num(-0.1), torch.ones(5, dtype=torch.bool), own=0, k=3)
        tensor([1, 3])
    """
    check_explore(explore)
    if k < 1:
        raise ConfigurationError(f"top_k_download(k={k}): expected at least 1.")
    if relevance.ndim != 1 or relevance.shape != available.shape or not 0 <= own < len(relevance):
        raise ValueError(
            f"expected relevance [n], available [n] and own in 0 .. n - 1, got {list(relevance.shape)}, "
            f"{list(available.shape)} and {own}."
        )
    unvisited = relevance.isnan().cpu()
    scores = relevance.detach().cpu().double().nan_to_num(0.0)
    candidates = available.cpu() & (scores >= 0)
    candidates[own] = False
    if not bool((candidates & unvisited).any()):
        k = max(int((candidates & (scores > 0)).sum()), 1)
    # A random order, then stable sorts by what matters less to what matters more.
    order = torch.randperm(len(scores), generator=generator)
    order = order[scores[order].argsort(descending=True, stable=True)]
    if explore == "unvisited":
        order = order[unvisited[order].int().argsort(descending=True, stable=True)]
    return order[candidates[order]][:k]
