"""RemoteData: what the server knows of data that lie at sites, and its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import lightning as L
import torch
from torch import Tensor

from flsv.data import FederatedDataModule
from flsv.data.contents import loader_hash, loader_rows
from flsv.data.groups import client_called


class RemoteData(FederatedDataModule):
    """The sizes that sites have announced, and the server's own validation and test data.

    Args:
        names: of the sites.
        sizes: by site, its samples by split.
        num_classes: M; None where the data have no classes, or ``class_names`` names them.
        class_names: their names.
        own: the server's own data, of which the validation and test loaders are used; None: it has none.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[Mapping[str, int]],
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        own: L.LightningDataModule | None = None,
    ) -> None:
        super().__init__()
        self.names, self._sizes, self._own = tuple(names), list(sizes), own
        self._class_names = tuple(class_names or map(str, range(num_classes or 0)))

    def prepare_data(self) -> None:
        if self._own is not None:
            self._own.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        if self._own is not None:
            self._own.trainer = self.trainer
            self._own.setup(stage or "fit")

    def teardown(self, stage: str) -> None:
        if self._own is not None:
            self._own.teardown(stage)

    def val_dataloader(self) -> Any:
        return [] if self._own is None else self._own.val_dataloader()

    def test_dataloader(self) -> Any:
        return [] if self._own is None else self._own.test_dataloader()

    def client_loader(self, client: int, split: Literal["train", "val", "test"] = "train", *_: Any, **__: Any) -> Any:
        """Nothing can be read of it. Its length is the number of samples: batches are the site's to choose."""
        return _Elsewhere(self._sizes[client][split], f"{client_called(client, self.names)} are at its site")

    def client_indices(self, client: int, split: Literal["train", "val", "test"] = "train") -> Tensor:
        return torch.arange(self._sizes[client][split])

    def client_labels(self, client: int, split: Literal["train", "val", "test"] = "train") -> Tensor:
        """All 0: labels stay at the site."""
        return torch.zeros(self._sizes[client][split], dtype=torch.long)

    def content_hashes(self) -> dict[str, str]:
        """Hashes of the server's validation set only: samples stay at the sites."""
        return {"server": loader_hash(self.val_dataloader())}

    @property
    def num_clients(self) -> int:
        return len(self.names)

    @property
    def class_counts(self) -> Tensor:
        """``[n, 1]``: the server knows how many samples there are, not of which class."""
        return torch.tensor([[sizes["train"]] for sizes in self._sizes])

    @property
    def known_class_counts(self) -> None:
        return None

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def no_classes(self) -> str | None:
        return None if self._class_names else "the server was told no num_classes"

    @property
    def class_names(self) -> tuple[str, ...]:
        return self._class_names or ("samples",)

    @property
    def client_names(self) -> tuple[str, ...]:
        return self.names

    @property
    def input_shape(self) -> Any:
        """As the server's own data have it, if they say."""
        return getattr(self._own, "input_shape", None)

    @property
    def server_val_indices(self) -> Tensor:
        return torch.arange(0)

    def validation(self) -> dict[str, Any] | None:
        """Of the server's own data."""
        if isinstance(self._own, FederatedDataModule):
            return self._own.validation()
        loaders = self.val_dataloader()
        return {"of": "the server's own data", "rows": loader_rows(loaders)} if loaders else None

    def describe(self) -> dict[str, str | int | float]:
        return {
            "source": f"sites {', '.join(self.names)}",
            "num_clients": self.num_clients,
            "num_classes": self.num_classes,
            "train_samples": int(self.num_samples.sum()),
        }

    def __str__(self) -> str:
        return f"RemoteData({', '.join(self.names)})"


class _Elsewhere:
    def __init__(self, length: int, whose: str) -> None:
        self._length, self._whose = length, whose

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> NoReturn:
        raise PermissionError(f"the samples of {self._whose}.")
