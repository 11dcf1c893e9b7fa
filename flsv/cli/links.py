"""Links from the data to arguments of the model, such as the number of classes."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser
from torch.distributed import is_torchelastic_launched

from flsv import FederatedDataModule
from flsv.utilities.errors import ConfigurationError

_REQUIRED_ARGUMENTS = re.compile(
    r'^Parser key "model":.*arguments are required: (?P<names>[\w, ]+)', flags=re.DOTALL
)
#: Names of a model's argument that is the length of a sample with one dimension.
_LENGTH_ARGUMENTS = ("num_features", "in_features", "input_size", "input_dim")


def link_required(parser: LightningArgumentParser, message: str) -> bool:
    """Link the data to the arguments of the model that an error of the parser says are required.

    Return whether there are any.
    """
    match = _REQUIRED_ARGUMENTS.search(message)
    if match is None:
        return False
    for name in match["names"].split(", "):
        parser.link_arguments(
            "data",
            f"model.init_args.{name}",
            compute_fn=partial(_value_in_data, name=name),
            apply_on="instantiate",
        )
    return True


def _value_in_data(data: FederatedDataModule, name: str) -> Any:
    """Return an attribute of the project's data module or, after the setup, of the federation's data module."""
    value = _attribute(data, name)
    if value is None:
        if not is_torchelastic_launched():  # else the processes would download at once
            data.prepare_data()
        data.setup("fit")
        value = _attribute(data, name)
    if value is None:
        value = _value_in_federation(data, name)
    if value is None:
        raise ConfigurationError(
            f"model: the argument {name} is required, but neither the configuration nor the data module has it. "
            f"Set model.init_args.{name}, or add an attribute {name} to the data module."
        )
    return value


def _attribute(data: FederatedDataModule, name: str) -> Any:
    value = None
    if isinstance(data.source, L.LightningDataModule):
        value = getattr(data.source, name, None)
    return None if callable(value) else value


def _value_in_federation(data: FederatedDataModule, name: str) -> Any:
    if name == "input_shape":
        return data.input_shape
    if name in _LENGTH_ARGUMENTS and len(data.input_shape) == 1:
        return data.input_shape[0]
    if name in ("num_classes", "class_names") and data.no_classes is None:  # the data have classes
        return getattr(data, name)
    return None
