"""What the data modules for CSV files share: the file, who holds what out, and the loaders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from flsv.arguments import check_number
from flsv.data.sets.csv_file import CSVFile, find_file, read_csv
from flsv.data.sets.csv_values import group_values
from flsv.errors import ConfigurationError
from flsv.seeding import generator_for

SPLITS = ("train", "val", "test")


class CSVData(L.LightningDataModule):
    """A data module that reads CSV files: subclasses say what becomes of the rows.

    Validation and test samples are drawn at random over all groups, and never all of a group: one sample of each stays
    for training.

    Args:
        path: the file, looked up below ``root``, then as it is.
        group: the column whose values are the natural clients; None: there are none.
        root: folder of the files.
        test_path: a second file with the same columns for testing; None: ``test_fraction`` of the first.
        batch_size: samples per batch.
        val_fraction: share of the first file's samples for validation; 0: no validation set.
        test_fraction: share of them for testing, unless there is a ``test_path``; 0: no test set.
        delimiter: one character between values.
        seed: of the choice of validation and test samples.

    Attributes:
        train_set, val_set, test_set: after ``setup``, each None where there is none. ``train_set.groups`` has the group
            of each sample, ``train_set.group_kind`` the column's name, ``train_set.classes`` the classes' names.
        group_names: the groups in the order in which :class:`~flsv.data.GroupPartitioner` makes clients of them.
        input_shape: shape of one sample.
        num_classes: number of classes; None where there are none.

    Raises:
        ConfigurationError: from construction, arguments out of range; from ``setup``, a file that is missing, no such
            table, or without a named column, or a row without a group.
    """

    pooled_inputs = False
    """Whether samples are made with numbers of all training rows, such as their means: no site alone can do that."""

    def __init__(
        self,
        path: str,
        group: str | None = None,
        *,
        root: str = "data",
        test_path: str | None = None,
        batch_size: int = 32,
        val_fraction: float = 0.1,
        test_fraction: float = 0.0,
        delimiter: str = ",",
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_number(self, "batch_size", batch_size, least=1, whole=True)
        for name, share in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            check_number(self, name, share, least=0, below=1)
        if test_path is not None and test_fraction:
            raise ConfigurationError(
                f"{type(self).__name__}: test samples are those of test_path={test_path!r}, or test_fraction="
                f"{test_fraction} of the first file. Give one of them."
            )
        if val_fraction + test_fraction >= 1:
            raise ConfigurationError(
                f"{type(self).__name__}: val_fraction={val_fraction} and test_fraction={test_fraction} leave nothing "
                "to train on. Their sum must be below 1."
            )
        self.path, self.test_path, self.root, self.group = path, test_path, root, group
        self.batch_size, self.delimiter, self.seed = batch_size, delimiter, seed
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.train_set: TensorDataset | None = None
        self.val_set: TensorDataset | None = None
        self.test_set: TensorDataset | None = None
        self.group_names: tuple[str, ...] = ()
        self.input_shape: tuple[int, ...] | None = None
        self.num_classes: int | None = None

    @abstractmethod
    def encode(self, train: CSVFile, test: CSVFile | None) -> None:
        """Make the data sets of the files; called once."""

    def setup(self, stage: str | None = None) -> None:
        """Read the files. Calling it again changes nothing."""
        if self.train_set is None:
            files = [
                None if path is None else read_csv(find_file(path, self.root), self.delimiter)
                for path in (self.path, self.test_path)
            ]
            assert files[0] is not None
            self.encode(files[0], files[1])

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches of the training samples."""
        generator = generator_for(self.seed, "csv", "order")
        return DataLoader(self._set("train"), batch_size=self.batch_size, shuffle=True, generator=generator)

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """Batches of the validation samples; an empty list if there are none."""
        return [] if self.val_set is None else DataLoader(self.val_set, batch_size=max(self.batch_size, 256))

    def test_dataloader(self) -> DataLoader:
        """Batches of the test samples."""
        return DataLoader(self._set("test"), batch_size=max(self.batch_size, 256))

    # For subclasses

    def read_groups(self, file: CSVFile) -> np.ndarray | None:
        """The group of each row ``[N]``, as numbers if all are; None without a group column."""
        if self.group is None:
            return None
        return group_values(file, self.group)

    def split(self, samples: int, groups: np.ndarray | None) -> dict[str, np.ndarray]:
        """Ascending sample numbers of ``train``, ``val`` and ``test``."""
        order = torch.randperm(samples, generator=generator_for(self.seed, "csv", "split")).numpy()
        # The first of each group in this order stays.
        of = np.zeros(samples, dtype=int) if groups is None else groups
        stays = order[np.unique(of[order], return_index=True)[1]]
        free = order[~np.isin(order, stays)]
        test, val = (int(share * samples + 0.5) for share in (self.test_fraction, self.val_fraction))
        for name, size in (("val_fraction", val), ("test_fraction", test)):
            if getattr(self, name) and not size:
                raise ConfigurationError(
                    f"{type(self).__name__}: {name}={getattr(self, name)} of {samples} samples is none. Raise it, or "
                    "set it to 0."
                )
        if test + val > len(free):
            raise ConfigurationError(
                f"{type(self).__name__}: {test + val} of {samples} samples are to be held out, but one of each of the "
                f"{len(stays)} groups has to stay for training. Lower val_fraction or test_fraction."
            )
        parts = (np.concatenate([stays, free[test + val :]]), free[test : test + val], free[:test])
        return {name: np.sort(part) for name, part in zip(SPLITS, parts)}

    def keep(
        self,
        tensors: Sequence[Tensor],
        splits: dict[str, np.ndarray],
        groups: np.ndarray | None,
        test: Sequence[Tensor] | None,
        classes: Sequence[str] | None = None,
    ) -> None:
        """Make the data sets: ``tensors`` by ``splits``, and ``test`` if there is a file for it."""
        parts = {name: [tensor[torch.from_numpy(rows)] for tensor in tensors] for name, rows in splits.items()}
        sets = {name: TensorDataset(*part) if len(part[0]) else None for name, part in parts.items()}
        self.train_set, self.val_set = sets["train"], sets["val"]
        self.test_set = sets["test"] if test is None else TensorDataset(*test)
        assert self.train_set is not None
        if groups is not None:
            self.train_set.groups = groups[splits["train"]]  # type: ignore[attr-defined]
            self.train_set.group_kind = self.group  # type: ignore[attr-defined]
            self.group_names = tuple(map(str, np.unique(groups)))
        if classes is not None:
            self.train_set.classes = tuple(classes)  # type: ignore[attr-defined]
            self.num_classes = len(classes)

    def _set(self, split: str) -> TensorDataset:
        found = getattr(self, f"{split}_set")
        if found is not None:
            return found
        if self.train_set is None:
            raise RuntimeError(
                f"{type(self).__name__} has not read its file yet: let a Trainer do it, or call setup()."
            )
        raise ConfigurationError(
            f"{type(self).__name__}({self.path!r}) has no test samples. Give test_fraction or test_path."
        )
