"""The checks of flsv's own parts beyond those of :mod:`flsv.testing`: of personalizers and samplers, and
with clients at sites, whose packets go through JSON."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from remote_federation import SiteTransport
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from flsv.data import FederatedDataModule, OneClient, Splits
from flsv.engines.remote import Directory, RemoteData, RemoteFederation, Site, agreement
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.personalization import Personalizer
from flsv.sampling import ClientSampler
from flsv.sampling.base import chances_of, cohort_of
from flsv.strategy import Federation
from flsv.testing import fits
from flsv.testing.checks import Case, PartCheck, expect, is_one, pickles, same, untouched_rngs
from flsv.testing.fits import IN_A_FIT
from flsv.testing.rounds import NUM_CLASSES, NUM_CLIENTS, SAMPLES, Rounds

# Of all parts.


def dealt(tables: Iterable[Sequence[list[PartCheck]]], shared: Sequence[str]) -> Any:
    """As :func:`flsv.testing.parametrize_with_checks`. A check of ``shared`` is slow for two of three parts, the next
    check for other ones: fast tests have every check for parts of each table, and some of them for every part."""
    checks, marks = [], []
    for table in tables:
        for place, of_part in enumerate(table):
            for check in of_part:
                name = check.check.__name__
                slow = name in shared and (place + shared.index(name)) % 3 != 0
                checks.append(check)
                marks.append([pytest.mark.slow] if slow else [])
    made = [pytest.param(check, marks=mark) for check, mark in zip(checks, marks)]
    return pytest.mark.parametrize("check", made, ids=str)


def repr_is_code(case: Case) -> None:
    """repr shows the class and no address in memory."""
    text = repr(case.new())
    expect(text.startswith(type(case.part).__name__ + "(") and " at 0x" not in text, text)


def remote_is_equal(case: fits.FitCase) -> None:
    """With the clients at sites, from which nothing but messages comes, the first round ends alike, or is refused."""
    if case.sees_clients:
        case.expect_the_same(partial(remotely, case), rounds=1, rtol=1e-5)


class ServerData(L.LightningDataModule):
    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*fits.samples_of(-1)), batch_size=fits.VALIDATION)


def site_data(client: int) -> FederatedDataModule:
    splits = Splits(server_val=0.0, client_val=0.25, client_test=0.125)
    return FederatedDataModule(fits.samples_of(client), OneClient(), batch_size=4, splits=splits)


def remotely(case: fits.FitCase, loop: FederatedLoop) -> fits.Fit:
    """One round with every client at a site, whose packets go through JSON and copies."""
    names = [f"site {client}" for client in range(fits.NUM_CLIENTS)]
    options: dict[str, Any] = {"trainer": {"accelerator": "cpu"}, "questions": (), "upload_seed": fits.SEED}
    with tempfile.TemporaryDirectory() as folder:
        sites = {
            100 + client: Site(case.module, partial(site_data, client), case.make, Path(folder, name), **options)
            for client, name in enumerate(names)
        }
        wire, ours = SiteTransport(sites, names), agreement(case.module(), loop)
        directory = Directory(wire, names, ours, Path(folder, "book.json"), timeout=1, wait=0.2)
        directory.gather()
        sizes = [directory.sizes[client] for client in range(fits.NUM_CLIENTS)]
        data = RemoteData(names, sizes, fits.NUM_CLASSES, own=ServerData())
        return case.fit(loop.replace(engine=partial(RemoteFederation, directory)), 1, data)


#: Of aggregators and client algorithms, beside those of flsv.testing.
MORE = (repr_is_code, remote_is_equal)
OF_ALL = (is_one, pickles, repr_is_code)


# Personalizers.


class PersonalizerCase(fits.FitCase):
    role = "personalizer"
    base = Personalizer


def starts_are_models(case: PersonalizerCase) -> None:
    """What clients are sent to start from are finite models [P], or None, and asking for them changes nothing."""
    loop = case.uninterrupted.loop
    personalizer: Any = loop.personalizer
    size = len(loop.state.model())
    for client in range(fits.NUM_CLIENTS):
        before = personalizer.state_dict()
        one, again = (personalizer.start(client, loop.state) for _ in range(2))
        expect(one is None or (one.shape == (size,) and one.isfinite().all()), one)
        expect(same(one, again) and same(before, personalizer.state_dict()), "another one, or another state")


PersonalizerCase.checks = (*OF_ALL, starts_are_models, *IN_A_FIT, remote_is_equal)


# Samplers.


def federation(rounds: Rounds, num_clients: int = NUM_CLIENTS) -> Federation:
    """What is known before the first of these rounds; of fewer clients, if that is said."""
    return Federation(
        rounds[0].global_vector,
        rounds.space,
        num_clients,
        NUM_CLASSES,
        {split: torch.full((num_clients,), SAMPLES) for split in ("train", "val", "test")},
        seed=0,
        client_names=[f"client {client}" for client in range(num_clients)],
    )


class SamplerCase(fits.FitCase):
    role = "sampler"
    base = ClientSampler

    @cached_property
    def rounds(self) -> Rounds:
        """Whose clients are asked, where it asks any."""
        return Rounds()

    def draw(self, num_clients: int = NUM_CLIENTS, known: int = 0) -> Callable[[int], list[int]]:
        """Begins a run; what is given back draws a cohort from a seed.

        Args:
            num_clients: of the federation.
            known: how many of them have a value of the metric that it reads; the others' are NaN. 0: there is none.
        """
        sampler, start = self.new(), federation(self.rounds, num_clients)
        sampler.check(num_clients)
        sampler.begin(start)
        asked, contributions = self.rounds.clients[:num_clients], self.contributions(known)

        def cohort(seed: int) -> list[int]:
            draw = torch.Generator().manual_seed(seed)
            return cohort_of(sampler, num_clients, contributions, draw, 0, asked, start.global_vector)

        return cohort

    def contributions(self, known: int) -> dict[str, Tensor]:
        """Of the metric that it reads: the first clients' values, NaN for the others."""
        if self.part.metric is None or not known:
            return {}
        values = torch.linspace(0.1, 0.9, NUM_CLIENTS)
        values[known:] = float("nan")
        return {self.part.metric: values}

    def chances(self, known: int, cohort: Sequence[int]) -> Tensor | None:
        """Everybody's probability to be drawn; None where it says that nobody knows."""
        sampler = self.new()
        sampler.begin(federation(self.rounds))
        try:
            return chances_of(sampler, NUM_CLIENTS, self.contributions(known), 0, cohort)
        except ConfigurationError:
            return None


def draws_clients(case: SamplerCase) -> None:
    """A cohort are ids of clients, ascending, each once, by the generator alone; whatever the metric says of them."""
    for known in (0, 2, NUM_CLIENTS):
        draw = case.draw(known=known)
        for seed in range(10):
            with untouched_rngs("a sampler"):
                one, again = draw(seed), draw(seed)
            expect(one == again == sorted(one), f"{one} and {again}")
            case.chances(known, one)


def probabilities_are_true(case: SamplerCase) -> None:
    """Clients are drawn as often as inclusion_probabilities says, within 4.5 standard errors."""
    draws = 400
    for known in (2, NUM_CLIENTS):
        draw, counts = case.draw(known=known), torch.zeros(NUM_CLIENTS, dtype=torch.float64)
        chances = case.chances(known, draw(0))
        if chances is None:
            return
        for seed in range(draws):
            counts[draw(seed)] += 1
        chances = chances.double()
        error = (counts / draws - chances).abs()
        bound = 4.5 * (chances * (1 - chances)).clamp_min(1e-4).div(draws).sqrt() + 2e-2 * chances
        expect((error <= bound).all(), f"{(counts / draws).tolist()} instead of {chances.tolist()}")


def small_federations_are_refused(case: SamplerCase) -> None:
    """check or begin refuses a federation from which no cohort can be drawn."""
    for num_clients in (1, 2):
        try:
            draw = case.draw(num_clients)
        except ConfigurationError:
            continue
        for seed in range(5):
            draw(seed)


SamplerCase.checks = (
    *OF_ALL, draws_clients, probabilities_are_true, small_federations_are_refused, fits.state_is_saved,
    fits.resumes_in_a_fit,
)  # fmt: skip
