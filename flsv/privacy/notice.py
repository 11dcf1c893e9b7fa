"""Warns that contributions measured on noised updates may mean nothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from flsv.privacy.gaussian import GaussianPrivacy

#: What docs/results/privacy_contributions.md has measured.
MEASURED = (
    "on digits and Fashion-MNIST, below epsilon = 100, SSV and FedSV ranked clients nearly at random (Spearman's "
    "correlation with the values without noise -0.2 to 0.4), CSSV and CGSV no better than numbers of samples do"
)


def warn_of_noise(privacy: GaussianPrivacy | None, metrics: Sequence[str]) -> None:
    """Warn, in one line, that these metrics are computed from noised updates; nothing without noise or metrics.

    Args:
        privacy: of the run; None: there is none.
        metrics: names of those that follow from what clients upload.
    """
    if privacy is None or not privacy.noise_multiplier or not metrics:
        return
    warnings.warn(
        f"metrics {list(metrics)} are computed from noised updates (noise_multiplier={privacy.noise_multiplier:g}): "
        f"{MEASURED}. See docs/results/privacy_contributions.md.",
        stacklevel=2,
    )
