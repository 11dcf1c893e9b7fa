"""The checks of flsv's own uploads and filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from own_cases import OF_ALL, federation, remote_is_equal
from torch import Tensor

from flsv.filters import Cohort, UpdateFilter
from flsv.loop import FederatedLoop
from flsv.round import ClientUpdate
from flsv.seeding import generator_for
from flsv.testing import fits
from flsv.testing.checks import expect, same, untouched_rngs
from flsv.testing.rounds import COHORTS, NUM_CLIENTS, Rounds
from flsv.uploads import Upload, UploadContext

#: Of the updates that are sent: parameters, and buffers behind them.
PARAMETERS, BUFFERS = 12, 3


def context(client: int, round_index: int = 0, dtype: Any = torch.float32, **state: Any) -> UploadContext:
    start = torch.zeros(PARAMETERS + BUFFERS, dtype=dtype)
    return UploadContext(client, NUM_CLIENTS, PARAMETERS, round_index, start=start, **state)


def update_of(client: int, dtype: Any = torch.float32) -> Tensor:
    """A client's update, parameters and buffers."""
    return torch.randn(PARAMETERS + BUFFERS, generator=generator_for(0, "update", client)).to(dtype)


class UploadCase(fits.FitCase):
    base = Upload

    def placed(self, part: Any) -> dict[str, Any]:
        return {"uploads": [part]}

    def sent(self, client: int, round_index: int = 0, state: Any = None) -> Tensor:
        """What a client sends instead of :func:`update_of`."""
        return self.new().apply(update_of(client), context(client, round_index, state={} if state is None else state))


def gives_an_update(case: UploadCase) -> None:
    """A finite update of the same shape and precision; the one that came in stays as it was."""
    for dtype in (torch.float32, torch.float64):
        for client in range(NUM_CLIENTS):
            update = update_of(client, dtype)
            sent = case.new().apply(update, context(client, dtype=dtype, state={}))
            expect(sent.shape == update.shape and sent.dtype == dtype and sent.isfinite().all(), sent)
            expect(same(update, update_of(client, dtype)), "a changed argument")


def seed_decides(case: UploadCase) -> None:
    """The same client in the same round sends the same, and nobody else's random numbers are touched."""
    for client in range(NUM_CLIENTS):
        with untouched_rngs("an upload"):
            one, again = (case.sent(client) for _ in range(2))
        expect(same(one, again), f"{one} and {again}")


def clients_are_apart(case: UploadCase) -> None:
    """What a client sends does not depend on what others have sent before: what it keeps is in its own state."""
    part, states = case.new(), [dict[str, Tensor]() for _ in range(NUM_CLIENTS)]
    for round_index in range(2):
        for client in range(NUM_CLIENTS):
            together = part.apply(update_of(client), context(client, round_index, state=states[client]))
            alone_state: dict[str, Tensor] = {}
            for earlier in range(round_index + 1):
                alone = case.sent(client, earlier, alone_state)
            expect(same(together, alone), f"{together} and {alone}")


UploadCase.checks = (
    *OF_ALL, gives_an_update, seed_decides, clients_are_apart, fits.resumes_in_a_fit,
    fits.vmap_is_equal, remote_is_equal,
)  # fmt: skip


class FilterCase(fits.FitCase):
    base = UpdateFilter

    def placed(self, part: Any) -> dict[str, Any]:
        return {"filters": [part]}

    def begun(self) -> Any:
        """A filter in a run of five clients."""
        part = self.new()
        part.begin(federation(Rounds()))
        return part

    def taken(self, loop: FederatedLoop) -> Any:
        return next(each for each in loop.filters if type(each) is type(self.part))


def cohort(index: int = 0, long: float = 1.0, order: Sequence[int] | None = None) -> Cohort:
    """A round's updates before the server looks at them.

    Args:
        index: of the round.
        long: how many times as long the last client's update is.
        order: places of the clients, where they are not to be ascending.
    """
    round = Rounds()[index]
    rows, start = round.client_vectors.clone(), round.global_vector
    rows[-1] = start + long * (rows[-1] - start)
    places = list(range(len(rows))) if order is None else list(order)
    ids, samples = round.client_ids[places].tolist(), round.num_samples[places]
    rows = rows[places]
    updates = tuple(
        ClientUpdate(client, int(size), row, norm=float((row - start).norm()))
        for client, size, row in zip(ids, samples.tolist(), rows)
    )
    return Cohort(index, updates, rows, (start,) * len(ids), samples, round.space.num_parameters, float(start.norm()))


def gives_a_cohort(case: FilterCase) -> None:
    """What remains is a cohort of some of the clients, with a row and a number each; nothing is changed in place."""
    for index in range(len(COHORTS)):
        for long in (1.0, 1e6):
            before, given = cohort(index, long), cohort(index, long)
            left = case.begun().apply(given)
            sizes = {len(left.updates), len(left.matrix), len(left.starts), len(left.num_samples)}
            expect(isinstance(left, Cohort) and set(left.ids) <= set(given.ids), left)
            expect(len(sizes) == 1 and 0 not in sizes, sizes)
            kept = same(given.matrix, before.matrix) and same(given.num_samples, before.num_samples)
            expect(kept, "a changed argument")


def order_does_not_matter(case: FilterCase) -> None:
    """Who is left, and with what, does not depend on the order of the clients."""
    for long in (1.0, 1e6):
        cohorts = (case.begun().apply(cohort(0, long, order)) for order in (None, (2, 0, 1)))
        mine, theirs = (
            dict(sorted((client, (row, size)) for client, row, size in zip(each.ids, each.matrix, each.num_samples)))
            for each in cohorts
        )
        expect(same(mine, theirs, rtol=1e-5), f"{mine} and {theirs}")


def one_client_stays(case: FilterCase) -> None:
    """A cohort of one has nobody to be compared with."""
    alone = cohort().keep(torch.tensor([True, False, False]))
    expect(case.begun().apply(alone).ids == alone.ids, "nobody")


FilterCase.checks = (
    *OF_ALL, gives_a_cohort, order_does_not_matter, one_client_stays, fits.state_is_saved, fits.resumes_in_a_fit,
)  # fmt: skip
