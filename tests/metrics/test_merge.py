"""Parts of a run that cannot be put together are refused; see ``parts_merge`` of flsv.testing for those that can."""

from __future__ import annotations

import pytest
from metric_table import CASES

from flsv.errors import ConfigurationError
from flsv.metrics import ClassSpecificShapley, ContributionMetric, PartialFederatedShapley

needs_merge = pytest.mark.skipif(
    not hasattr(ClassSpecificShapley, "merge_state"), reason="torchmetrics before 1.5 cannot merge"
)


@needs_merge
@pytest.mark.parametrize("name", ["CosineGradientShapley", "OneRoundShapley"])
def test_what_depends_on_all_rounds_in_their_order_has_no_parts(name: str) -> None:
    one, other = CASES[name].fed([0]), CASES[name].fed([0])
    with pytest.raises(ConfigurationError, match=f"{name} needs all rounds in one place"):
        other.merge_state(one)


@needs_merge
@pytest.mark.parametrize(
    ("one", "other", "match"),
    [
        (
            ClassSpecificShapley(3, 2),
            ClassSpecificShapley(3, 2, momentum=0.5),
            r"momentum=0.9 and 0.5 cannot be merged",
        ),
        (ClassSpecificShapley(3, 2), ClassSpecificShapley(4, 2), r"num_clients=3 and 4 cannot be merged"),
        (PartialFederatedShapley(3), PartialFederatedShapley(3, estimator="exact"), r"estimator='auto' and 'exact'"),
        (PartialFederatedShapley(), PartialFederatedShapley(3), "nothing to merge into: pass num_clients"),
    ],
)
def test_metrics_that_do_not_mean_the_same_are_not_merged(
    one: ContributionMetric, other: ContributionMetric, match: str
) -> None:
    with pytest.raises(ConfigurationError, match=match):
        one.merge_state(other)
