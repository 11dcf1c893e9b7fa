"""What a sampler gives is looked at before anybody goes by it: with a client twice, a mask in place of ids, or a client
counted from the end, a round would look like any other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.sampling.base import ClientSampler
from flsv.strategy import Contributions

#: Probabilities are worked out in float32.
_ROUNDING = 1e-4


def cohort_of(
    sampler: ClientSampler,
    num_clients: int,
    contributions: Contributions,
    generator: torch.Generator,
    round_index: int,
) -> list[int]:
    """Client ids of the round's cohort, as ``sampler`` draws it, see :meth:`ClientSampler.sample`.

    Raises:
        RuntimeError: nobody, a client twice or one that does not exist, or what are no integers ``[k]``.

    Example:
        >>> from flsv.sampling import FixedCohort
        >>> cohort_of(FixedCohort([3, 0]), 5, {}, torch.Generator(), 0)
        [0, 3]
    """
    drawn = torch.as_tensor(sampler.sample(num_clients, contributions, generator, round_index))
    what = f"{sampler!r} drew for round {round_index}"
    if not drawn.numel():
        raise RuntimeError(f"{sampler!r} drew no client for round {round_index}.")
    if drawn.ndim != 1:
        raise RuntimeError(f"{what} a tensor of shape {list(drawn.shape)}; expected the ids [k] of its clients.")
    if drawn.dtype == torch.bool or drawn.is_floating_point():
        hint = " Say mask.nonzero().flatten()." if drawn.dtype == torch.bool else ""
        raise RuntimeError(f"{what} {drawn.dtype}; expected integers, the ids of its clients.{hint}")
    cohort: list[int] = drawn.tolist()
    if min(cohort) < 0 or max(cohort) >= num_clients:
        raise RuntimeError(f"{what} {cohort}; there are clients 0 to {num_clients - 1}.")
    if len(set(cohort)) < len(cohort):
        twice = next(client for client in cohort if cohort.count(client) > 1)
        raise RuntimeError(f"{what} {cohort}: client {twice} twice. Draw without replacement.")
    return cohort


def chances_of(
    sampler: ClientSampler,
    num_clients: int,
    contributions: Contributions,
    round_index: int,
    cohort: Sequence[int],
) -> Tensor:
    """Everybody's probability ``[n]`` to be drawn, see :meth:`ClientSampler.inclusion_probabilities`; it is divided by.

    Raises:
        RuntimeError: not one for each client, or one of the cohort's not in (0, 1].
    """
    chances = sampler.inclusion_probabilities(num_clients, contributions, round_index)
    what = f"{sampler!r}.inclusion_probabilities"
    if chances.shape != (num_clients,):
        raise RuntimeError(
            f"{what} gave the shape {list(chances.shape)}; expected one for each client, [{num_clients}]."
        )
    own = chances[torch.as_tensor(cohort, device=chances.device)]
    wrong = (~((own > 0) & (own <= 1 + _ROUNDING))).nonzero().flatten().tolist()
    if wrong:
        raise RuntimeError(
            f"{what}: client {cohort[wrong[0]]} is in the cohort of round {round_index}, and its probability is "
            f"{own[wrong[0]].item()}; expected more than 0 and at most 1."
        )
    return chances
