"""What checkpoints and results hold of each part: another text would keep stored runs from going on."""

import importlib
import json
from pathlib import Path

import pytest

from flsv.configuration.identity import described

path = Path(__file__).with_name("identities.json")
text = path.read_text()
#: ``{"module:class": {"arguments": ..., "identity": text}}``, as the version of 27 November 2026 had them.
STORED_PARTS = json.loads(text)


@pytest.mark.fast_rows
@pytest.mark.parametrize("class_path", STORED_PARTS)
def test_identity_of_a_part_is_that_of_stored_runs(class_path):
    """A change needs another format of checkpoints, or stored runs do not go on."""
    stored = STORED_PARTS[class_path]
    module_name, _, class_name = class_path.partition(":")
    module = importlib.import_module(module_name)
    part_class = getattr(module, class_name)

    part = part_class(*stored["arguments"])
    identity = described(part)

    assert identity == stored["identity"]
