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
