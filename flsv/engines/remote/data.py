"""RemoteData: the server's data module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from flsv.data import FederatedDataModule
from flsv.data.contents import loader_hash, loader_rows
from flsv.data.federated_data import FederatedData
from flsv.data.groups import client_called
from flsv.data.labels import Classes
from flsv.data.partition import FederatedSplits


class RemoteData(FederatedDataModule):
    """Data module of the server, with stand-ins for the sites' samples.

    Each announced sample has a stand-in with the label 0, which takes no memory and raises an error when it is read.

    Args:
        names: the sites' names.
        sizes: for each site, its number of samples in each split, ``{split: number}``.
        num_classes: the number M of classes. None if the data have no classes, or if ``class_names`` is given.
        class_names: the classes' names.
        own: the server's own data module, whose validation and test loaders are used. None if it has none.
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
        missing = None if num_classes or class_names else "the server was told no num_classes"
        labels = _stand_ins(max(max(each.values()) for each in sizes))
        counted = tuple({split: _stand_ins(size) for split, size in each.items()} for each in sizes)
        self._dealt = FederatedData(
            train=TensorDataset(labels),
            val=None,
            test=None,
            splits=FederatedSplits(torch.arange(0), counted, self.names),
            classes=Classes(labels, tuple(class_names or map(str, range(num_classes or 0))) or ("samples",), missing),
            train_options={},
            eval_options={},
            differs=torch.zeros(1, dtype=torch.bool).expand(len(labels)),
        )

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
        """Return a stand-in loader, which knows only the number of samples."""
        return _Elsewhere(self._sizes[client][split], f"{client_called(client, self.names)} are at its site")

    def content_hashes(self) -> dict[str, str]:
        """Return the hash of the server's validation set only."""
        return {"server": loader_hash(self.val_dataloader())}

    def dealt_to(self, client: int) -> list[Tensor]:
        """Return the client's numbers of samples in each split, in place of indices."""
        return [torch.tensor(list(self._sizes[client].values()))]

    def to_device(self, trainer: L.Trainer) -> FederatedData | None:
        """Return the stand-ins without copying them to the device, where they would take memory."""
        return self._dealt

    @property
    def class_counts(self) -> Tensor:
        """Return each client's number of training samples ``[n, 1]``, as if of one class."""
        return torch.tensor([[sizes["train"]] for sizes in self._sizes])

    @property
    def known_class_counts(self) -> None:
        return None

    @property
    def input_shape(self) -> Any:
        """Return the ``input_shape`` of the server's own data module, if any."""
        return getattr(self._own, "input_shape", None)

    def validation(self) -> dict[str, Any] | None:
        """Describe the server's own validation data, if any."""
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


def _stand_ins(count: int) -> Tensor:
    """Return ``count`` zeros, int64, that share the memory of a single one."""
    return torch.zeros(1, dtype=torch.long).expand(count)


class _Elsewhere:
    """Loader of a known length whose samples are at a site, so that reading raises PermissionError."""

    def __init__(self, length: int, whose: str) -> None:
        self._length, self._whose = length, whose

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> NoReturn:
        raise PermissionError(f"the samples of {self._whose}.")
