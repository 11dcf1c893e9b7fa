"""``save_hyperparameters`` for objects that a LightningCLI creates as arguments of others.

Where class paths stand for the model or the data, Lightning gives every LightningModule, or data module, of the
configuration the arguments of the outermost: a data module that is a ``FederatedDataModule``'s source would have the
``FederatedDataModule``'s, in its own ``__init__`` already.
"""

from __future__ import annotations

import pydoc
from functools import wraps
from typing import Any

from lightning.pytorch import cli


def keep_apart() -> None:
    """From now on, what is nested saves its own arguments, as it does where Python makes it."""
    plain = cli._InstantiatorFn.__call__

    @wraps(plain)
    def call(self: Any, class_type: type, *args: Any, **kwargs: Any) -> Any:
        config = self.cli.config
        command = config.get("subcommand")
        asked = pydoc.locate(
            config.get(f"{command}.{self.key}.class_path" if command else f"{self.key}.class_path") or ""
        )
        if isinstance(asked, type) and asked is not class_type:
            kwargs.pop("applied_instantiation_links", None)  # said to Lightning's instantiator, not to the class
            return class_type(*args, **kwargs)
        return plain(self, class_type, *args, **kwargs)

    cli._InstantiatorFn.__call__ = call  # type: ignore[method-assign]
