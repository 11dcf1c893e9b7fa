"""Every kind of module, as it is, in a federation: what comes out is what a loop written by hand gives."""

from __future__ import annotations

import pytest
import torch
from compat.by_hand import coalition_values, validated
from compat.kinds import contrastive, generative, hooks, sequences, supervised, transfer
from compat.kinds.base import Kind
from compat.runs import Pair, both
from sifted import slow_except

from flsv.metrics import PartialFederatedShapley

KINDS: dict[str, Kind] = {
    **generative.KINDS,
    **contrastive.KINDS,
    **transfer.KINDS,
    **supervised.KINDS,
    **sequences.KINDS,
    **hooks.KINDS,
}


#: Another of the same kind is fast.
SLOW = ("spectral-norm-gan", "byol-before-zero-grad", "moco", "hydra-template-compiled")


@pytest.fixture(scope="module", params=slow_except([name for name in KINDS if name not in SLOW], KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The same training in a federation that plays a game every round, and by hand."""
    kind = KINDS[request.param]
    metric = PartialFederatedShapley(performance=kind.logged, mode="min", weighting="samples", estimator="exact")
    return both(kind, tmp_path_factory.mktemp(request.param), metrics={"value": metric})


def test_trains_as_by_hand(pair: Pair) -> None:
    pair.check()


def test_is_valued_as_by_hand(pair: Pair) -> None:
    """Of the last round: a Trainer validates the average of every coalition."""
    kind, last = pair.kind, pair.history[-1]
    source, logged = kind.data(), kind.logged
    expected = coalition_values(last, lambda model: -validated(model, source, logged, **kind.trainer), last.sizes)
    found = pair.loop.contributions["value"].double()
    assert expected.abs().max() > 100 * kind.values_tolerance
    torch.testing.assert_close(found, expected, rtol=kind.values_tolerance, atol=kind.values_tolerance)
