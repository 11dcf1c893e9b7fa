"""What clients are asked about a round's average without their own part in it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flsv.participants import Client, NoAnswer, run_protocol
from flsv.round import Round, of_sums


@of_sums
def secure_sum(round: Round) -> Tensor:
    """``[P]``: the average of the cohort's models by this round's aggregation weights, made to sum to 1.

    It is what a server would be given by secure aggregation: one sum, and no single model.
    """
    if round.sum_weight is not None:
        return round.client_vectors[0]
    assert round.aggregation_weights is not None
    return round.combine(shares(round.aggregation_weights).to(round.client_vectors))


def shares(weights: Tensor) -> Tensor:
    """Weights that sum to 1, float64 ``[k]`` on the CPU; equal ones where all are 0.

    Raises:
        ValueError: a weight below 0.
    """
    weights = weights.cpu().double()
    if bool((weights < 0).any()):
        raise ValueError(
            f"aggregation weights {weights.tolist()}: a client with a weight below 0 cannot be taken out of the "
            "average. Use an aggregator whose weights are at least 0, such as FedAvg."
        )
    total = weights.sum()
    return weights / total if total > 0 else torch.full_like(weights, 1 / len(weights))


def asked_scores(
    clients: Sequence[Client], aggregate: Tensor, weights: Tensor | None, question: Any
) -> tuple[Tensor, Tensor]:
    """What clients answer about the aggregate ``[P]`` without their part, of weight ``weights[i]``; None: they know it.

    Returns:
        float64 ``[a]`` of those that have answered, in their order, and bool ``[k]`` who that is. Who is at a site of
        its own and has not is named in a warning.
    """
    own = dict(zip([client.id for client in clients], [None] * len(clients) if weights is None else weights.tolist()))

    def asked(client: Client) -> Tensor | None:
        try:
            answer = client.ask(question, aggregate, own[client.id])
            if not isinstance(answer, Tensor) or answer.numel() != 1:
                raise NoAnswer(f"client {client.id} was asked for a number and answered {answer!r:.80}.")
        except NoAnswer as why:
            warnings.warn(f"{why} What others are worth to it is not known in this round.", stacklevel=2)
            return None
        return answer.double().reshape(())

    told = run_protocol(clients, asked)
    said = torch.tensor([answer is not None for answer in told], dtype=torch.bool)
    nothing = torch.zeros((), dtype=torch.float64)
    answers = torch.stack([*(each.cpu() for each in told if each is not None), nothing])[:-1]
    broken = [client.id for client, answer in zip(clients, told) if answer is not None and not answer.isfinite()]
    if broken:
        raise ValueError(
            f"the others' model has a score that is not finite on the validation samples of clients {broken}: a value "
            "cannot be made of it. Measure by a bounded score (performance='accuracy'), or lower the learning rate."
        )
    return answers, said
