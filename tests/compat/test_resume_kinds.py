"""Kinds of modules whose state lies in odd places: a run that is stopped and resumed is the one that is not."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from compat.kinds import contrastive, generative, hooks, sequences, supervised, transfer
from compat.kinds.base import Kind, federated
from compat.runs import SEED
from resuming import assert_resumes
from sifted import slow_except

from flsv import FederatedLoop, Reporting
from flsv.metrics import PartialFederatedShapley

KINDS: dict[str, Kind] = {
    name: kinds[name]
    for kinds, names in (
        (generative.KINDS, ["wgan", "spectral-norm-gan"]),
        (contrastive.KINDS, ["byol", "moco-non-persistent"]),
        (transfer.KINDS, ["frozen-backbone"]),
        (supervised.KINDS, ["manual-accumulation"]),
        (sequences.KINDS, ["carried-lstm-state"]),
        (hooks.KINDS, ["hooks"]),
    )
    for name in names
}


#: Two optimizers with spectral norm, buffers outside of the state dictionary, a state that is carried on.
FAST = ("spectral-norm-gan", "moco-non-persistent", "carried-lstm-state")


@pytest.mark.parametrize("name", slow_except(FAST, KINDS))
def test_resumes_to_the_bit(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]

    def loop() -> FederatedLoop:
        value = PartialFederatedShapley(performance=kind.logged, mode="min")
        return FederatedLoop(
            metrics={"value": value}, optimizer_state="persist", seed=SEED, reporting=Reporting(table=False)
        )

    assert_resumes(loop, tmp_path, kind.module, partial(federated, kind))
