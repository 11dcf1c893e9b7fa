"""ClientSampler: base class of the rules that draw the cohort of a round."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from flsv.core import Client, FederationState
from flsv.core.strategy import Contributions, Strategy
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for

#: How far a probability may lie above 1, since probabilities are computed in float32.
_ROUNDING = 1e-4


class ClientSampler(Strategy):
    """Base class of samplers, which draw a round's cohort. They also compute each client's probability to be drawn.

    Attributes:
        members: ids of the clients from which the sampler draws, see :meth:`among`. None for all clients.
    """

    members: Sequence[int] | None = None

    @abstractmethod
    def sample(
        self,
        num_clients: int,
        contributions: Contributions,
        generator: torch.Generator,
        round_index: int = 0,
    ) -> Tensor:
        """Draw the cohort: return its k clients' ids, integers ``[k]``, ascending and without repetition.

        Args:
            num_clients: n, number of clients of the federation.
            contributions: the metrics' values after the previous round.
            generator: the generator to draw from, and no other. It depends on the run's seed and the round.
            round_index: the round, from 0.
        """

    def choose(
        self,
        clients: Sequence[Client],
        model: Tensor,
        contributions: Contributions,
        generator: torch.Generator,
        round_index: int = 0,
    ) -> Tensor:
        """Draw the cohort by values, such as losses, that are first requested from clients. By default, call
        :meth:`sample` instead.

        The traffic of the requests is counted in the round for which the cohort is drawn.

        Args:
            clients: all n clients. Send requests by :meth:`flsv.core.Client.request` within
            :func:`flsv.core.map_clients`.
            model: the global model ``[P]`` at the start of the round.
            contributions: the metrics' values after the previous round.
            generator: the generator to draw from, and no other.
            round_index: the round, from 0.
        """
        return self.sample(len(clients), contributions, generator, round_index)

    def among(self, members: Sequence[int]) -> ClientSampler:
        """Return the sampler for a coalition, whose federation is like this one but has only the clients ``members``.

        It draws among the coalition's members only, as many as this sampler draws, or all if they are fewer. It uses
        the same random numbers: for the coalition of all clients it draws the cohorts of the run, for others cohorts as
        similar to them as possible.

        Args:
            members: the ids of the coalition's clients, at least one.

        Raises:
            ConfigurationError: the sampler chooses by contributions or losses, which differ between coalitions, or does
                not override this method.
        """
        raise ConfigurationError(
            f"{self!r} cannot draw cohorts for a coalition that is trained without the other clients: it draws by "
            "values or losses, or has no method `among`. Use UniformSampler or BernoulliSampler, or retrain without "
            "a sampler (flsv retrain RUN --federation.sampler null), so that all members train in every round."
        )

    @property
    def sends_requests(self) -> bool:
        """Return whether the sampler sends requests to clients before it draws a cohort."""
        return type(self).choose is not ClientSampler.choose

    @abstractmethod
    def inclusion_probabilities(
        self,
        num_clients: int,
        contributions: Contributions,
        round_index: int = 0,
    ) -> Tensor:
        """Compute the probability ``[n]`` of each client to be in the cohort that :meth:`sample` draws.

        Aggregators divide by this probability to estimate a sum over all clients without bias (Horvitz and Thompson
        1952).
        """

    def draws_only(self, clients: Collection[int], num_clients: int) -> bool:
        """Return whether all clients that can be drawn are among ``clients``, so that a round needs one of these."""
        drawable = range(num_clients) if self.members is None else self.members
        return set(clients).issuperset(drawable)

    def check(self, client_names: Sequence[str]) -> None:
        """Raise a :class:`flsv.ConfigurationError` if no cohort can be drawn from the clients with these names. By
        default this is so if they are fewer than the sampler's ``cohort_size``.
        """
        num_clients = len(client_names)
        if num_clients < getattr(self, "cohort_size", 0):
            raise ConfigurationError(
                f"{self!r} cannot draw its cohort, since the federation has {num_clients} clients. Lower cohort_size "
                f"to {num_clients}, or set more clients in the partitioner."
            )


def coalition_sampler(sampler: ClientSampler, members: Sequence[int]) -> ClientSampler:
    """Return the sampler for a coalition, see :meth:`ClientSampler.among`, with its :attr:`ClientSampler.members`."""
    sampler_of_coalition = sampler.among(members)
    if sampler_of_coalition.members is None:  # a sampler's own `among` need not set it
        sampler_of_coalition.members = sorted(members)
    return sampler_of_coalition


def draw_cohort(
    sampler: ClientSampler,
    state: FederationState,
    contributions: Contributions,
    clients: Sequence[Client],
) -> list[int]:
    """Draw the client ids of a round's cohort, and check them. ``state`` is that of a run or of a coalition."""
    round_index = state.round_index
    generator = generator_for(state.seed, "cohort", round_index)
    chosen_ids = sampler.choose(clients, state.model(), contributions, generator, round_index)
    ids = torch.as_tensor(chosen_ids)
    cohort: list[int] = ids.tolist()
    if not _is_vector_of_integers(ids) or not _are_distinct_ids(cohort, state.num_clients):
        raise RuntimeError(
            f"{sampler!r} drew {cohort} ({ids.dtype}) for round {round_index + 1}, but a cohort must be a vector of "
            f"distinct client ids, integers from 0 to {state.num_clients - 1}. Convert a mask by "
            "mask.nonzero().flatten()."
        )
    _check_members(sampler, cohort)
    return cohort


def _check_members(sampler: ClientSampler, cohort: list[int]) -> None:
    if sampler.members is not None and not set(cohort) <= set(sampler.members):
        raise RuntimeError(
            f"{sampler!r} drew {cohort} for the coalition {list(sampler.members)}, but a sampler that overrides "
            "`sample` must draw from its `members` if they are not None."
        )


def _is_vector_of_integers(ids: Tensor) -> bool:
    are_integers = ids.dtype != torch.bool and not ids.is_floating_point()
    return are_integers and ids.ndim == 1 and len(ids) > 0


def _are_distinct_ids(ids: list[int], num_clients: int) -> bool:
    distinct_ids = set(ids)
    return len(distinct_ids) == len(ids) and distinct_ids <= set(range(num_clients))


def checked_probabilities(
    sampler: ClientSampler,
    num_clients: int,
    contributions: Contributions,
    round_index: int,
    cohort: Sequence[int],
) -> Tensor:
    """Compute each client's probability ``[n]`` to be drawn, and check it."""
    probabilities = sampler.inclusion_probabilities(num_clients, contributions, round_index)
    if probabilities.shape != (num_clients,):
        raise RuntimeError(
            f"{sampler!r}.inclusion_probabilities returned shape {list(probabilities.shape)} for round "
            f"{round_index + 1}, but [{num_clients}] is expected, one probability for each client."
        )

    ids = torch.as_tensor(cohort, device=probabilities.device)
    probabilities_of_cohort = probabilities[ids]
    is_valid = (probabilities_of_cohort > 0) & (probabilities_of_cohort <= 1 + _ROUNDING)
    if not is_valid.all():
        raise RuntimeError(
            f"{sampler!r}.inclusion_probabilities returned {probabilities_of_cohort.tolist()[:20]} for the drawn "
            f"clients {cohort[:20]} of round {round_index + 1}, but expected are numbers above 0 and at most 1."
        )
    return probabilities
