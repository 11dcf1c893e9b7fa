"""gaussian_epsilon: the privacy loss of releases of a Gaussian mechanism."""

from __future__ import annotations

import math
from functools import lru_cache
from types import ModuleType
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from flsv.utilities.declared import NonNegative, checked
from flsv.utilities.errors import ConfigurationError


@lru_cache(maxsize=4096)
@checked
def gaussian_epsilon(
    noise_multiplier: NonNegative,
    rounds: Annotated[int, Ge(0)],
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5,
) -> float:
    """Compute epsilon after ``rounds`` releases of a Gaussian mechanism.

    They are as private as one release with the noise multiplier divided by sqrt(rounds) (Dong, Roth and Su, JRSS B
    2022), whose epsilon is known exactly (Balle and Wang, ICML 2018, theorem 8).

    Args:
        noise_multiplier: the noise's standard deviation divided by the sensitivity. 0 means no noise.
        rounds: number of releases, at least 0.
        delta: the probability that epsilon does not hold, in (0, 1).

    Returns:
        Epsilon. Infinite without noise, 0 without a release.

    Raises:
        ConfigurationError: an argument is out of range, or the package dp-accounting is not installed.

    Example:
        >>> [round(gaussian_epsilon(2.0, rounds), 2) for rounds in (0, 1, 20)]
        [0.0, 1.99, 11.48]
        >>> gaussian_epsilon(0.0, 1)
        inf
    """
    if rounds == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    library = _dp_accounting()
    return float(library.get_epsilon_gaussian(noise_multiplier / math.sqrt(rounds), delta))


def _dp_accounting() -> ModuleType:
    try:
        import dp_accounting  # slow to import, and an optional dependency
    except ImportError as error:
        raise ConfigurationError(
            "epsilon is computed by the package dp-accounting (0.6 or later), which cannot be imported. "
            "Install it: pip install 'dp-accounting>=0.6'."
        ) from error
    return dp_accounting
