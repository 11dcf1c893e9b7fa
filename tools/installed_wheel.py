"""Fail unless flsv is installed as a wheel with its hard dependencies alone, and values a loop of one's own."""

import sys
from importlib.metadata import version
from importlib.util import find_spec

import torch

import flsv
from flsv.models import build_network

#: Of the extras, one each. With one of them here, nothing would show that flsv needs it.
EXTRAS = ("peft", "pyarrow", "flwr", "dp_accounting", "pytest", "hypothesis")

assert flsv.__file__.startswith(sys.prefix), flsv.__file__
print("flsv", flsv.__version__, "on Python", sys.version.split()[0], "with torch", version("torch"))
installed = [name for name in EXTRAS if find_spec(name)]
assert not installed, f"installed beside the hard dependencies: {installed}"
assert build_network("timm:resnet10t", 3, (3, 32, 32)).fc.out_features == 3

start = {"weight": torch.zeros(1, 1)}
sent = [{"weight": torch.full((1, 1), weight)} for weight in (1.0, 3.0)]
loader = [(torch.ones(4, 1), torch.ones(4, 1))]
network = torch.nn.Linear(1, 1, bias=False)
values = flsv.value_round(network, start, sent, loader, loss=torch.nn.functional.mse_loss)
# v: -1 of nobody (0), 0 of client 0 (1), -4 of client 1 (3), -1 of both (2).
assert values["PartialFederatedShapley"].tolist() == [2.0, -2.0], values
