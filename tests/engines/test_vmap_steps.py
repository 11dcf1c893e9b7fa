"""What steps hang on beside parameters, buffers and the batch: rows come to what models come to one after the other, or
are refused before training."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flsv import FederatedLoop, Reporting
from flsv.utilities.errors import ConfigurationError
from helpers import slow_except
from helpers.coalitions_by_hand import SEED, make_three_clients
from helpers.fits import fit, state_vector
from helpers.models import STEP_CASES

#: One of each way in which a step could be another.
FAST = (
    "annealed per batch by a callback",
    "annealed by current_epoch",
    "a generator of NumPy",
    "NumPy's own generator",
    "a masked loss",
    "torchmetrics",
    "accumulated",
    "a timer that clamps weights",
    "a layer under two names",
)
NAMES = slow_except(FAST, STEP_CASES)


def make_loop(**options: Any) -> FederatedLoop:
    return FederatedLoop(seed=SEED, reporting=Reporting(table=False, files=False), **options)


def train_case(
    name: str,
    folder: Path,
    federation: FederatedLoop,
    refused: str | None,
) -> Any:
    """The module after a fit of two rounds; None where it was refused before the first."""
    make, callbacks, *_ = STEP_CASES[name]
    torch.manual_seed(SEED)
    module = make()
    initial_vector = state_vector(module)

    if refused is None:
        return fit(
            federation,
            folder,
            module,
            make_three_clients(),
            rounds=2,
            callbacks=callbacks(),
        )

    with pytest.raises(ConfigurationError, match=refused):
        fit(federation, folder, module, make_three_clients(), rounds=2, callbacks=callbacks())

    assert federation.round_index == 0
    assert torch.equal(state_vector(module), initial_vector)

    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_vmap_clients_equal_sequential_ones_or_are_refused(tmp_path: Path, name: str) -> None:
    module = train_case(name, tmp_path, make_loop(engine="vmap"), STEP_CASES[name][2])

    if module is not None:
        expected = state_vector(train_case(name, tmp_path, make_loop(), None))
        torch.testing.assert_close(state_vector(module), expected, rtol=1e-5, atol=1e-5)
