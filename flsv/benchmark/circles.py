"""Samples orders of many clients and trains their prefixes, where there are too many coalitions to train all.

The Shapley value is the mean over all orders of what a client adds to those before it. Orders drawn alone leave it to
chance who comes early, where a client adds most. So the clients are put on a circle, in random order, and all 2 n
orders are walked that begin anywhere on it and go either way: each client has each place twice. Their prefixes are the
arcs of the circle, n (n - 1) coalitions beside the empty one and that of all, since an order and its reverse use the
same. An order that begins anywhere is as random as one that is drawn, so the mean is unbiased; a circle is one sample.

For as many trained coalitions the variance is a small part of that of orders and their reverses that are drawn alone
(Castro et al. 2009): below a fifth on the tables of six clients that are shipped, ``tests/benchmark/test_circles.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.functional.shapley.game import MemoizedGame
from flsv.functional.shapley.permutation import marginals_along
from flsv.functional.shapley.sampling import prefixes, random_permutations
from flsv.seeding import generator_for


def circular_orders(num_clients: int, seed: int, circle: int) -> Tensor:
    """The orders that begin anywhere on a random circle and go either way, int ``[2 n, n]``.

    Args:
        num_clients: n.
        seed: of the drawing; other seeds have other circles.
        circle: which of a seed's.

    Example:
        >>> orders = circular_orders(4, seed=100, circle=0)
        >>> orders.shape, [orders[:, place].bincount().tolist() for place in range(2)]
        (torch.Size([8, 4]), [[2, 2, 2, 2], [2, 2, 2, 2]])
    """
    (order,) = random_permutations(1, num_clients, generator_for(seed, "circle", circle))
    onwards = torch.stack([order.roll(-start) for start in range(num_clients)])
    return torch.cat([onwards, onwards.flip(1)])


def arcs(num_clients: int, seed: int, circles: int) -> Tensor:
    """The distinct coalitions of so many circles, bool ``[K, n]``, the empty one and that of all first.

    Example:
        >>> arcs(20, seed=100, circles=2).shape
        torch.Size([718, 20])
    """
    both = torch.tensor([[False], [True]]).expand(2, num_clients)
    met = [prefixes(circular_orders(num_clients, seed, circle)).flatten(0, 1) for circle in range(circles)]
    found = dict.fromkeys(tuple(mask) for mask in torch.cat([both, *met]).tolist())
    return torch.tensor(list(found))


def values_by_circles(game: MemoizedGame, num_clients: int, seed: int, circles: int) -> Tensor:
    """Each circle's estimate of the Shapley values, float64 ``[circles, n]``; every one is unbiased and their sum over
    the clients is the gain of all.

    Args:
        game: the utility of coalitions, which is asked for the arcs only.
        num_clients: n.
        seed: of the drawing.
        circles: how many.
    """
    each = [marginals_along(game, circular_orders(num_clients, seed, circle)) for circle in range(circles)]
    return torch.stack([marginals.mean(0).squeeze(-1).double() for marginals in each])
