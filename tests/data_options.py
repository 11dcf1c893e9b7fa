"""The data module's options as they are most easily said in a test: all by their own names, flat."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from flsv.data import FederatedDataModule, Files, Loader, Splits


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """``server_val``, ``root``, ``drop_last`` and their like in the objects that they are arguments of."""
    found = dict(options)
    for name, kind in (("splits", Splits), ("files", Files), ("loader", Loader)):
        mine = {each.name: found.pop(each.name) for each in fields(kind) if each.name in found}  # type: ignore[arg-type]
        if mine:
            found[name] = kind(**mine)
    return found


def ready(*args: Any, **options: Any) -> FederatedDataModule:
    """A data module with such options, set up."""
    data = FederatedDataModule(*args, **grouped(options))
    data.setup("fit")
    return data
