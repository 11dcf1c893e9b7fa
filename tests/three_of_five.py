"""A federation of three of five clients, as tests/by_hand.py has it."""

from typing import Any

from by_hand import LOCAL_EPOCHS, SEED

from flsv.federation import FederatedLoop
from flsv.sampling import UniformSampler


def loop(**options: Any) -> FederatedLoop:
    return FederatedLoop(**{"sampler": UniformSampler(3), "local_epochs": LOCAL_EPOCHS, "seed": SEED, **options})
