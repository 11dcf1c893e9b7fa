"""Checks of samplers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from flsv.core import FederationState
from flsv.core.strategy import FederationInfo
from flsv.sampling import ClientSampler
from flsv.sampling.base import checked_probabilities, draw_cohort
from flsv.testing import fits
from flsv.testing.checks import ensure, pickles, untouched_rngs
from flsv.testing.rounds import NUM_CLASSES, NUM_CLIENTS, NUM_SAMPLES, ROUND_INDICES, PreparedRounds
from flsv.utilities.errors import ConfigurationError

NUM_DRAWS = 400


def federation_of(rounds: PreparedRounds, num_clients: int = NUM_CLIENTS) -> FederationInfo:
    """Return what is known before the first of some prepared rounds."""
    sizes = {}
    for split in ("train", "val", "test"):
        sizes[split] = torch.full((num_clients,), NUM_SAMPLES)
    return FederationInfo(
        rounds[0].global_vector,
        rounds.space,
        num_clients,
        NUM_CLASSES,
        sizes,
        seed=0,
        client_names=[f"client {client}" for client in range(num_clients)],
    )


class SamplerCase(fits.FitCase):
    """Sampler under test."""

    role = "sampler"
    base = ClientSampler
    # What a sampler counts tells only after some rounds.
    num_rounds = 8
    interrupted_after = 3

    @cached_property
    def rounds(self) -> PreparedRounds:
        """Return prepared rounds, to whose clients a sampler may send requests."""
        return PreparedRounds()

    def begun(self, num_rounds: int = 0) -> ClientSampler:
        """Return a new copy of the sampler after some prepared rounds of a run."""
        sampler: ClientSampler = self.new()
        federation = federation_of(self.rounds)
        sampler.check(federation.client_names)
        sampler.set_up(federation)
        sampler.begin(federation)
        for index in ROUND_INDICES[:num_rounds]:
            sampler.end_round(self.rounds[index])
        return sampler

    def draw_cohort(
        self,
        sampler: ClientSampler,
        seed: int,
        num_valued: int,
        round_index: int,
        model: Tensor,
    ) -> list[int]:
        """Return the clients that a sampler draws.

        Args:
            sampler: the sampler, see :meth:`begun`.
            seed: seed of the random generator.
            num_valued: number of clients with a value of the metric that the sampler reads. The others' are NaN.
            round_index: the round's number, from 0.
            model: the global model ``[P]``.
        """
        state = FederationState(NUM_CLIENTS, seed, round_index=round_index, global_vector=model)
        return draw_cohort(sampler, state, self.contributions(num_valued), self.rounds.clients)

    def contributions(self, num_valued: int) -> dict[str, Tensor]:
        """Return the values of the metric that the sampler reads: the first clients', and NaN for the others."""
        if self.part.metric is None or not num_valued:
            return {}
        values = torch.linspace(0.1, 0.9, NUM_CLIENTS)
        values[num_valued:] = float("nan")
        return {self.part.metric: values}

    def probabilities(
        self,
        num_valued: int,
        cohort: Sequence[int],
        num_rounds: int = 0,
    ) -> Tensor | None:
        """Return all clients' probabilities to be drawn, or None if the sampler knows none."""
        sampler = self.begun(num_rounds)
        contributions = self.contributions(num_valued)
        try:
            return checked_probabilities(
                sampler, NUM_CLIENTS, contributions, round_index=num_rounds, cohort=cohort
            )
        except ConfigurationError:
            return None


def draws_a_cohort(case: SamplerCase) -> None:
    """Check that sample returns ids of clients, ascending, each once, draws from its generator only, and draws clients
    as often as inclusion_probabilities says, within 4.5 standard errors. Sort the ids, pass the generator on, and
    compute the probability to be in the cohort, not to be drawn first."""
    for num_valued in (0, 2, NUM_CLIENTS):
        _check_draws(case, num_valued, num_rounds=0)
    _check_draws(case, NUM_CLIENTS, num_rounds=3)


def _check_draws(case: SamplerCase, num_valued: int, num_rounds: int) -> None:
    """Check a sampler after some rounds, where some clients have a value."""
    sampler = case.begun(num_rounds)
    draw_cohort = partial(
        case.draw_cohort,
        sampler,
        num_valued=num_valued,
        round_index=num_rounds,
        model=case.rounds[0].global_vector,
    )
    with untouched_rngs("a sampler"):
        cohort = draw_cohort(seed=0)
        same_cohort = draw_cohort(seed=0)
    is_repeatable = cohort == same_cohort
    is_ascending = cohort == sorted(cohort)
    ensure(is_repeatable and is_ascending, f"{cohort} and {same_cohort}")

    probabilities = case.probabilities(num_valued, cohort, num_rounds)
    if probabilities is not None:
        _check_frequencies(draw_cohort, probabilities.double())


def _check_frequencies(draw_cohort: Callable[..., list[int]], probabilities: Tensor) -> None:
    """Check that clients are drawn as often as the probabilities ``[n]`` say, within 4.5 standard errors."""
    counts = torch.zeros(NUM_CLIENTS, dtype=torch.float64)
    for seed in range(NUM_DRAWS):
        counts[draw_cohort(seed=seed)] += 1
    frequencies = counts / NUM_DRAWS
    variance = (probabilities * (1 - probabilities)).clamp_min(1e-4) / NUM_DRAWS
    bound = 4.5 * variance.sqrt() + 2e-2 * probabilities
    is_true = (frequencies - probabilities).abs() <= bound
    ensure(is_true.all(), f"{frequencies.tolist()} instead of {probabilities.tolist()}")


SamplerCase.checks = (pickles, draws_a_cohort, fits.resumes)
