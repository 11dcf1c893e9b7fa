"""The checks of flsv's own parts beyond those of :mod:`flsv.testing`: of personalizers, uploads and filters, and with
clients at sites, whose packets go through JSON."""

import itertools
import tempfile
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from flsv.core import ClientUpdate
from flsv.data import FederatedDataModule, OneClient, Splits
from flsv.filters import Cohort, UpdateFilter
from flsv.personalization import Personalizer
from flsv.sites import RemoteFederation, Site, agreement
from flsv.testing import fits
from flsv.testing.checks import ensure, equal, pickles, untouched_rngs
from flsv.testing.rounds import COHORTS, NUM_CLIENTS, PreparedRounds
from flsv.testing.samplers import federation_of
from flsv.uploads import Upload, UploadContext
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for
from helpers.sites import BOSTON_ADDRESS, SiteTransport, data_at_sites, gather_sites


# Of all parts.
def parametrize_checks(tables, shared):
    """As :func:`flsv.testing.parametrize_with_checks`. A check of ``shared`` is fast for every thirtieth part, the next
    check for other ones: fast tests have every check for parts of each table."""
    cases = []
    for table in tables:
        turns = min(30, len(table))
        for row, checks in enumerate(table):
            for check in checks:
                name = check.check.__name__
                turn = row + shared.index(name) if name in shared else 0
                marks = [pytest.mark.slow] if turn % turns else []
                cases.append(pytest.param(check, marks=marks))

    return pytest.mark.parametrize("check", cases, ids=str)


def repr_is_code(case):
    """repr shows the class and no address in memory."""
    text = repr(case.new())
    ensure(
        text.startswith(type(case.part).__name__ + "(") and " at 0x" not in text,
        text,
    )


def remote_is_equal(case):
    """With the clients at sites, from which nothing but messages comes, the first round ends alike, or is refused."""
    if sees_clients(case):
        expect_the_same(case, partial(train_at_sites, case), rounds=1, rtol=1e-5)


def vmap_is_equal(case):
    """Check that two rounds with engine="vmap" end like those of the default engine, up to rounding."""
    # The engine refuses every client algorithm.
    arguments = {**case.loop, **case.loop_arguments(case.part)}
    if sees_clients(case) and "client_algorithm" not in arguments:
        fit_two_rounds = partial(case.fit, rounds=2)
        expect_the_same(case, fit_two_rounds, rounds=2, rtol=1e-3, engine="vmap")


def sees_clients(case):
    """Whether the part uses clients. Otherwise it uses only the data of a round that the server has."""
    return getattr(case, "sees_clients", True)


def expect_the_same(
    case,
    fit,
    rounds,
    rtol,
    **changes,
):
    """Raise AssertionError if a fit of a loop with changed arguments is refused, or differs from the case's
    uninterrupted fit."""
    loop = None
    try:
        loop = case.make(**changes)
        changed_fit = fit(loop)
    except ConfigurationError as error:
        # Without a loop, make() has refused the arguments.
        rounds_done = 0 if loop is None else loop.round_index
        ensure(rounds_done == 0, f"a refusal after {rounds_done} rounds: {error}")
        raise AssertionError(f"a refusal: {error}") from error

    actual = results_of_rounds(changed_fit, rounds)
    expected = results_of_rounds(case.uninterrupted, rounds)
    fits.expect_same(actual, expected, rtol)


def results_of_rounds(fit, count):
    """The models and values after each of the first ``count`` rounds."""
    return {"models": fit.models[:count], "contributions": fit.contributions[:count]}


class ServerData(L.LightningDataModule):
    def val_dataloader(self):
        return DataLoader(
            TensorDataset(*fits.samples_of(-1)), batch_size=fits.NUM_VALIDATION_SAMPLES
        )


def make_site_data(client):
    splits = Splits(server_val=0.0, client_val=0.25, client_test=0.125)
    return FederatedDataModule(fits.samples_of(client), OneClient(), batch_size=4, splits=splits)


def train_at_sites(case, loop):
    """One round with every client at a site, whose packets go through JSON and copies."""
    names = [f"site {client}" for client in range(fits.NUM_CLIENTS)]
    with tempfile.TemporaryDirectory() as folder:
        sites = make_sites(case, names, Path(folder))
        facts = agreement(case.module(), loop)
        directory = gather_sites(
            Path(folder),
            SiteTransport(sites, names),
            facts,
            names,
        )
        data = data_at_sites(
            directory, names, num_classes=fits.NUM_CLASSES, server_data=ServerData()
        )
        remote_loop = loop.replace(engine=partial(RemoteFederation, directory))
        return case.fit(remote_loop, rounds=1, data=data)


def make_sites(case, names, folder):
    """A site of each client, by the addresses of :class:`SiteTransport`."""
    sites = {}
    for client, name in enumerate(names):
        sites[BOSTON_ADDRESS + client] = Site(
            case.module,
            partial(make_site_data, client),
            case.make,
            folder / name,
            trainer={"accelerator": "cpu"},
            functions=(),
            upload_seed=fits.SEED,
        )
    return sites


#: Of aggregators and client algorithms, beside those of flsv.testing.
MORE = (repr_is_code, vmap_is_equal, remote_is_equal)
OF_ALL = (pickles, repr_is_code)


# Personalizers.
class PersonalizerCase(fits.FitCase):
    role = "personalizer"
    base = Personalizer


def starts_are_models(case):
    """Check that clients start from finite models [P], or None, and that asking for them changes nothing."""
    loop = case.uninterrupted.loop
    personalizer = loop.personalizer
    size = len(loop.state.model())

    for client in range(fits.NUM_CLIENTS):
        state = personalizer.state_dict()
        model = personalizer.start(client, loop.state)
        same_model = personalizer.start(client, loop.state)
        is_finite_model = model is None or (model.shape == (size,) and model.isfinite().all())
        ensure(is_finite_model, model)
        is_same = equal(model, same_model) and equal(state, personalizer.state_dict())
        ensure(is_same, "another one, or another state")


PersonalizerCase.checks = (*OF_ALL, starts_are_models, fits.resumes, vmap_is_equal, remote_is_equal)


# Uploads and filters.
#: Of the updates that are sent: parameters, and buffers behind them.
PARAMETERS, BUFFERS = 12, 3


def make_context(client, round_index=0, dtype=torch.float32, **state):
    model = torch.zeros(PARAMETERS + BUFFERS, dtype=dtype)
    return UploadContext(client, NUM_CLIENTS, PARAMETERS, round_index, start=model, **state)


def make_update(client, dtype=torch.float32):
    """A client's update, parameters and buffers."""
    return torch.randn(PARAMETERS + BUFFERS, generator=generator_for(0, "update", client)).to(dtype)


class UploadCase(fits.FitCase):
    base = Upload

    def loop_arguments(self, part):
        return {"uploads": [part]}

    def sent(self, client, round_index=0, state=None):
        """Return what a client sends instead of :func:`make_update`."""
        return self.new().apply(
            make_update(client),
            make_context(client, round_index, state={} if state is None else state),
        )


def gives_an_update(case):
    """A finite update of the same shape and precision; the one that came in stays as it was."""
    for dtype in (torch.float32, torch.float64):
        for client in range(NUM_CLIENTS):
            update = make_update(client, dtype)
            context = make_context(client, dtype=dtype, state={})

            with untouched_rngs("an upload"):
                sent = case.new().apply(update, context)

            ensure(sent.shape == update.shape, sent)
            ensure(sent.dtype == dtype, sent)
            ensure(sent.isfinite().all(), sent)
            ensure(equal(update, make_update(client, dtype)), "a changed argument")


def clients_are_apart(case):
    """Check that what a client sends does not depend on what others have sent before."""
    part = case.new()
    states = [dict[str, Tensor]() for _ in range(NUM_CLIENTS)]
    for round_index in range(2):
        for client in range(NUM_CLIENTS):
            context = make_context(client, round_index, state=states[client])
            sent_among_others = part.apply(make_update(client), context)

            # A new part, which this client alone uses from the first round on.
            state_alone = {}
            for replayed_round in range(round_index + 1):
                sent_alone = case.sent(client, replayed_round, state_alone)

            ensure(equal(sent_among_others, sent_alone), f"{sent_among_others} and {sent_alone}")


UploadCase.checks = (
    *OF_ALL, gives_an_update, clients_are_apart, fits.resumes,
    vmap_is_equal, remote_is_equal,
)  # fmt: skip


class FilterCase(fits.FitCase):
    base = UpdateFilter

    def loop_arguments(self, part):
        return {"filters": [part]}

    def begun(self):
        """A filter in a run of five clients."""
        part = self.new()
        federation = federation_of(PreparedRounds())
        part.set_up(federation)
        part.begin(federation)
        return part


#: How many times as long the last client's update is: an ordinary one, and one of an attacker.
FACTORS = (1.0, 1e6)


def make_cohort(index=0, factor_of_last_update=1.0, order=None):
    """A round's updates before the server looks at them.

    Args:
        index: of the round.
        factor_of_last_update: how many times as long the last client's update is.
        order: places of the clients, where they are not to be ascending.
    """
    round = PreparedRounds()[index]
    model = round.global_vector
    vectors = round.client_vectors.clone()
    vectors[-1] = model + factor_of_last_update * (vectors[-1] - model)

    positions = list(range(len(vectors))) if order is None else list(order)
    ids = round.client_ids[positions].tolist()
    num_samples = round.num_samples[positions]
    vectors = vectors[positions]
    updates = []
    for client, size, vector in zip(ids, num_samples.tolist(), vectors):
        updates.append(ClientUpdate(client, int(size), vector))

    return Cohort(
        round_index=index,
        updates=tuple(updates),
        matrix=vectors,
        starts=(model,) * len(ids),
        num_samples=num_samples,
        num_parameters=round.space.num_parameters,
        model=model,
    )


def gives_a_cohort(case):
    """Check that some of the clients remain, with a row and a number each, and nothing changes in place."""
    for index, factor in itertools.product(range(len(COHORTS)), FACTORS):
        original = make_cohort(index, factor)
        argument = make_cohort(index, factor)
        filtered = case.begun().apply(argument)

        ensure(isinstance(filtered, Cohort), filtered)
        ensure(set(filtered.ids) <= set(argument.ids), filtered)
        sizes = {
            len(filtered.updates),
            len(filtered.matrix),
            len(filtered.starts),
            len(filtered.num_samples),
        }
        ensure(len(sizes) == 1 and 0 not in sizes, sizes)

        has_same_models = equal(argument.matrix, original.matrix)
        has_same_samples = equal(argument.num_samples, original.num_samples)
        ensure(has_same_models and has_same_samples, "a changed argument")


def order_does_not_matter(case):
    """Who is left, and with what, does not depend on the order of the clients."""
    for factor in FACTORS:
        ascending = rows_by_client(case.begun().apply(make_cohort(0, factor)))
        reordered = rows_by_client(case.begun().apply(make_cohort(0, factor, order=(2, 0, 1))))
        ensure(equal(ascending, reordered, rtol=1e-5), f"{ascending} and {reordered}")


def rows_by_client(cohort):
    """Return each client's model and number of samples, in ascending order of the clients."""
    rows = {}
    for client, row, size in zip(cohort.ids, cohort.matrix, cohort.num_samples):
        rows[client] = (row, size)
    return dict(sorted(rows.items()))


def one_client_stays(case):
    """A cohort of one has nobody to be compared with."""
    alone = make_cohort().keep(torch.tensor([True, False, False]))
    ensure(case.begun().apply(alone).ids == alone.ids, "nobody")


FilterCase.checks = (
    *OF_ALL, gives_a_cohort, order_does_not_matter, one_client_stays, fits.resumes,
)  # fmt: skip
