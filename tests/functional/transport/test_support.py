"""How many points may cross."""

from __future__ import annotations

import pytest

from flsv.errors import ConfigurationError
from flsv.functional.transport import check_support, safe_support


@pytest.mark.parametrize("samples", range(12))
def test_the_safe_support_is_the_largest_that_is_not_refused(samples: int) -> None:
    safe = safe_support(samples)
    assert 2 * safe < max(samples, 1)
    check_support(safe, samples)
    with pytest.raises(ConfigurationError, match=f"support={safe + 1}: client 3 has {samples} samples"):
        check_support(safe + 1, samples, "client 3")


def test_the_message_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"fedbary_reconstruction.md\). Take support=4 or less, or set allow"):
        check_support(5, 10)
    with pytest.raises(ConfigurationError, match="Leave it out, or set allow_reconstruction=True"):
        check_support(1, 2)
