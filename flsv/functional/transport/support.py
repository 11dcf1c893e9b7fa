"""How many points a client may answer without revealing a sample.

Each of the S points that a client returns is a mean of m/S of its m samples. Below the threshold the attack of
``tools/fedbary_reconstruction.py`` hardly finds a near copy of a sample: ``docs/results/fedbary_reconstruction.md``.
"""

from __future__ import annotations

from flsv.errors import ConfigurationError


def safe_support(samples: int) -> int:
    """The largest S below m/2; 0 for fewer than 3 samples, which no S protects.

    Example:
        >>> [safe_support(samples) for samples in (2, 3, 60, 61)]
        [0, 1, 29, 30]
    """
    return max(0, (samples - 1) // 2)


def check_support(support: int, samples: int, who: str = "the client") -> None:
    """Raise unless every point that crosses is a mean of more than two samples.

    Args:
        support: S, points that cross.
        samples: m, of the client.
        who: holds them, for the message.

    Raises:
        ConfigurationError: S is m/2 or more.
    """
    if support <= safe_support(samples):
        return
    advice = f"Take support={safe_support(samples)} or less" if safe_support(samples) else "Leave it out"
    raise ConfigurationError(
        f"support={support}: {who} has {samples} samples, and half as many interpolated points and more give them away "
        f"(docs/results/fedbary_reconstruction.md). {advice}, or set allow_reconstruction=True."
    )
