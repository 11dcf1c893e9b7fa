"""What checkpoints and results hold of each part: another text would keep stored runs from going on."""

import json
from pathlib import Path

import pytest

import flsv.aggregation
import flsv.metrics
from flsv.configuration.identity import described

path = Path(__file__).with_name("identities.json")
text = path.read_text()
IDENTITIES = json.loads(text)


@pytest.mark.parametrize("name", IDENTITIES)
def test_identity_of_a_part_is_that_of_stored_runs(name: str) -> None:
    """If it has to change, the format of checkpoints does, too."""
    if hasattr(flsv.metrics, name):
        part_class = getattr(flsv.metrics, name)
    else:
        part_class = getattr(flsv.aggregation, name)

    part = part_class()
    identity = described(part)

    assert identity == IDENTITIES[name]
