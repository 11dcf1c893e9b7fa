"""The row of a project whose module is in a script: valued, or refused before training."""

from functools import partial
from pathlib import Path

import pytest
from projects import Project, images, script
from public_projects import in_a_process, row

pytestmark = pytest.mark.slow

SCRIPT = """
import lightning as L
import torch
from torch import nn

RATE = 0.1
raise RuntimeError("a script trains where it is imported")


class Net(L.LightningModule):
    def __init__(self, last):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), last)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE)
"""


def project(last: str, folder: Path) -> Project:
    (folder / "train.py").write_text(SCRIPT)

    def make() -> object:
        train = script("train.py")
        return train.Net(getattr(train.nn, last)(*[64] * (last == "Linear"), 10))

    return Project("owner/name", "1234567", make, partial(images, "digits", 8, samples=96))


def test_project_is_valued_and_retrained_to_the_same(tmp_path: Path) -> None:
    name, module, way, same, values, retrained = in_a_process(lambda: row(project("Linear", tmp_path), tmp_path))
    assert (name, module, way, same) == ("owner/name, 1234567", "Net", "rows", "to the bit (2 tensors)")
    assert values.endswith("(accuracy)")
    assert any(float(value) for value in values.split(" (")[0].split(", "))
    assert retrained.startswith("the same values")


def test_refusal_is_said_with_its_time(tmp_path: Path) -> None:
    _, module, way, without, *rest = in_a_process(lambda: row(project("LazyLinear", tmp_path), tmp_path))
    assert module == "Net"
    assert rest == ["", ""]
    assert way.startswith("refused before training: ")
    assert "lazy layers" in way
    assert without == f"without the metric: {way}"
