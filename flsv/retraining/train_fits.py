"""Training of the coalitions that a store lacks, in any kind of process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

from flsv._lightning.rounding import ROUNDINGS, Rounding
from flsv.core import Ranks
from flsv.core.ranks import balance_load
from flsv.games.members import Members
from flsv.results.text import joined
from flsv.retraining.utility_store import Row, UtilityStore
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.supervisor import ChildFailed

Found = TypeVar("Found")
Order = TypeVar("Order")


@dataclass(frozen=True)
class Fit:
    """Result of training one coalition, as :class:`flsv.retraining.utility_store.UtilityStore` stores it."""

    # The model's utilities by round.
    rows: Mapping[int, Row]
    # The utilities before training, the empty coalition's after every round. None: they were not computed.
    empty: Row | None
    # A hash of the model before training.
    start: str
    # [2, P], the trained model and the one before training.
    model: Tensor | None = None
    rounding: Rounding = ROUNDINGS["float32"]
    # By performance, after each round, [R, V, ...].
    outputs: Mapping[str, Tensor] = field(default_factory=dict)


class Fits(Protocol):
    """Protocol of objects that train coalitions by separate fits, ``at_once`` at a time."""

    at_once: int

    def fits(
        self, coalitions: Sequence[Members], seed: int
    ) -> Iterator[tuple[Members, Fit | ChildFailed]]:
        """Train each coalition, and yield it with its result or error when done."""


class FitsFailed(ConfigurationError):
    """Error: some coalitions' fits have failed, ``{coalition: error}``."""

    def __init__(self, failed: Mapping[Members, ChildFailed]) -> None:
        self.failed = failed
        reasons: dict[str, list[Members]] = {}
        for members, why in failed.items():
            reasons.setdefault(f"{why}".rstrip("."), []).append(members)
        told = [f"{listed(of, show=_clients)}: {why}" for why, of in reasons.items()]
        super().__init__(
            f"{len(failed)} coalition{'s' * (len(failed) > 1)} failed to train, {'; '.join(told)}."
        )

    def __reduce__(self) -> tuple[type, tuple[Mapping[Members, ChildFailed]]]:
        """Let a rank send the error to the others, which make it anew from the coalitions."""
        return type(self), (self.failed,)


def _clients(members: Members) -> str:
    return f"client{'s' * (len(members) > 1)} {joined(map(str, members))}"


def train_fits(
    fits: Fits,
    num_samples: Sequence[int],
    coalitions: Sequence[Members],
    seed: int,
    store: UtilityStore,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Train the coalitions that a store lacks, each by a separate fit. Successful results are stored, even if other
    fits fail.
    """
    missing = store.missing(seed, coalitions)
    # The empty coalition's model is that of any fit before training.
    fitted = [members for members in missing if members]
    if missing and not fitted:
        fitted = [(0,)]
    costs = []
    for members in fitted:
        total_samples = sum(num_samples[client] for client in members)
        costs.append(float(total_samples))

    failed: dict[Members, ChildFailed] = {}
    starts: set[str] = set()
    for members, fit in _on_ranks(fits, fitted, costs, seed, store.ranks):
        if isinstance(fit, ChildFailed):
            failed[members] = fit
            continue
        starts.add(fit.start)
        _check_starts(starts)
        if members in missing:
            store.add(seed, members, fit.rows, fit.outputs)
        still_missing = store.missing(seed, [()])
        is_empty_missing = () in missing and bool(still_missing)
        if is_empty_missing and fit.empty is not None:
            empty_rows = dict.fromkeys(fit.rows, fit.empty)
            store.add(seed, (), empty_rows)
        say(store.progress(seed, coalitions))
    store.sort()
    if failed:
        raise FitsFailed(failed)


def _on_ranks(
    fits: Fits, coalitions: Sequence[Members], costs: Sequence[float], seed: int, ranks: Ranks
) -> Iterator[tuple[Members, Fit | ChildFailed]]:
    """Divide the coalitions among the ranks by ``costs``. Yield the results of all ranks."""
    if ranks.size == 1:
        yield from fits.fits(coalitions, seed)
        return
    owners = balance_load(costs, ranks.size)
    parts = [
        [each for each, owner in zip(coalitions, owners) if owner == rank]
        for rank in range(ranks.size)
    ]
    for start in range(0, max(1, *map(len, parts)), fits.at_once):
        mine = parts[ranks.rank][start : start + fits.at_once]
        yield from gathered(ranks, partial(fits.fits, mine, seed), "coalitions' trainings")


def gathered(
    ranks: Ranks, train: Callable[[], Iterable[tuple[Members, Found]]], about: str
) -> Iterator[tuple[Members, Found]]:
    """Call ``train`` on this rank, and yield the pairs of all ranks. Any rank's error is raised."""
    mine: dict[Members, Found] | Exception
    try:
        mine = dict(train())
    except Exception as error:
        mine = error
    for part in ranks.all_gather(mine, about):
        if isinstance(part, Exception):
            raise part
        yield from part.items()


def _check_starts(starts: set[str]) -> None:
    if len(starts) > 1:
        raise ConfigurationError(
            "two coalitions started from different weights, although their seed is the same, so that their models do "
            "not tell what a client adds: the module draws its weights by a generator of its own. Let torch's global "
            "generator draw them, which is seeded."
        )


def once_proved(
    found: Iterable[tuple[Order, Found | ChildFailed]], proof: Order | None
) -> Iterator[tuple[Order, Found | ChildFailed]]:
    """Yield the ``(order, result)`` pairs of ``found`` as soon as the order ``proof``, a test of the method, has
    succeeded. Raise FitsFailed if it fails.
    """
    held: list[tuple[Order, Found | ChildFailed]] = []
    for order, fit in found:
        held.append((order, fit))
        if proof is not None and order == proof:
            if isinstance(fit, ChildFailed):
                members: Any = getattr(order, "members", order)
                raise FitsFailed({members: fit})
            proof = None
        if proof is None:
            yield from held
            held.clear()
