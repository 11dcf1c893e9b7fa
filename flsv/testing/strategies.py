"""Checks of aggregators and client algorithms."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

from flsv.aggregation import Aggregator
from flsv.clients.algorithms import ClientAlgorithm
from flsv.server.config import ClientEvaluation
from flsv.testing import fits
from flsv.testing.checks import expect, is_one, pickles, same


class AggregatorCase(fits.FitCase):
    """An aggregator; see :class:`flsv.testing.fits.FitCase`."""

    role = "aggregator"
    base = Aggregator


class ClientAlgorithmCase(fits.FitCase):
    """A client algorithm; see :class:`flsv.testing.fits.FitCase`."""

    role = "client_algorithm"
    base = ClientAlgorithm


def weights_are_given(case: AggregatorCase) -> None:
    """Each row of round.client_ids has a finite weight, and the next model is finite: a client without a contribution
    has NaN there, so say what that counts as."""
    loop = case.make()
    aggregator: Any = loop.aggregator
    aggregate = aggregator.aggregate

    def watched(round: Any, contributions: Any) -> Any:
        vector, weights = aggregate(round, contributions)
        expect(weights.shape == (len(round),) and weights.isfinite().all(), f"weights {weights.tolist()}")
        expect(vector.isfinite().all(), f"a model with {int((~vector.isfinite()).sum())} entries that are not finite")
        return vector, weights

    aggregator.aggregate = watched
    case.fit(loop)


def trains_alone(case: ClientAlgorithmCase) -> None:
    """What a client trains does not depend on who has trained before it: keep what belongs to a client in
    context.state, and undo in leave_client what was changed in the module."""
    last = fits.COHORTS[0][-1]
    keep = {"evaluation": ClientEvaluation(keep_trained=True)}
    alone, together = (case.fit(case.make([who], **keep), 1).loop.trained[last] for who in ([last], fits.COHORTS[0]))
    expect(same(alone, together), f"{together.tolist()} after others and {alone.tolist()} alone")


def reports_are_declared(case: ClientAlgorithmCase) -> None:
    """What crosses beside the model is declared by names, each once, in sends and reports, tuples of the class."""
    names = [*case.part.sends, *case.part.reports]
    expect(all(names) and len(set(names)) == len(names), names)


#: What a part does at a client; the rest is the server's.
_CLIENT_SIDE = (
    "report", "receive", "own", "keep", "begin_client", "begin_batch", "frozen_parameters", "gradients",
    "leave_client", "end_client",
)  # fmt: skip


def sides_are_apart(case: fits.FitCase) -> None:
    """A fit ends alike, to the bit, in which the part is one object at the clients and another at the server, as on
    ranks and with clients at sites: what crosses is declared in sends and reports, what a client keeps goes into its
    state."""
    kind: Any = type(case.part)
    own = [n for n in _CLIENT_SIDE if hasattr(case.base, n) and getattr(kind, n) != getattr(case.base, n)]
    if not own:
        return
    server, client = (case.taken(case.make()) for _ in range(2))
    sides = {name: partialmethod(_at_client, getattr(client, name)) for name in own}
    # With a name as of a local class, which command lines do not take for one of the same short name.
    named = {"__module__": kind.__module__, "__qualname__": f"sides_are_apart.<locals>.{kind.__name__}"}
    server.__class__ = type(kind.__name__, (kind,), {**sides, **named})
    apart = case.fit(case.make(**{case.role: server}))
    fits.expect_same(apart.results(), case.uninterrupted.results())


def _at_client(server: Any, method: Any, *args: Any) -> Any:
    return method(*args)


IN_A_FIT = (
    sides_are_apart, fits.clients_permuted_in_a_fit, fits.state_is_saved, fits.resumes_in_a_fit, fits.vmap_is_equal,
)  # fmt: skip
AggregatorCase.checks = (is_one, pickles, weights_are_given, *IN_A_FIT)
ClientAlgorithmCase.checks = (is_one, pickles, reports_are_declared, trains_alone, *IN_A_FIT)
