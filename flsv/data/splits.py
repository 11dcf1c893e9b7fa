"""Splits: which samples are held out for validation and tests, by the server and by each client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import torch
from annotated_types import Ge, Lt
from lightning.pytorch.utilities import rank_zero_warn
from torch import Generator, Tensor

from flsv.data.groups import client_called, number_values
from flsv.data.partition import Partitioner, shuffled
from flsv.utilities.declared import Count, Rules, checked
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.seeding import generator_for

#: Share of a number of samples, in [0, 1).
Part = Annotated[float, Ge(0), Lt(1), "0.1 is 10 %."]
#: Each sample's value in a column, by the column's name.
ColumnReader: TypeAlias = Callable[[str], Sequence[Any]]

#: A client's sets of samples.
SplitName: TypeAlias = Literal["train", "val", "test"]
#: The held-out sets that :class:`Splits` makes.
HELD_OUT = ("server_val", "client_val", "client_test")


class SampleFilter(ABC):
    """Base class of methods that flag training samples, which ``Splits(drop_flagged=...)`` removes."""

    @abstractmethod
    def unflagged(self, data: Any, generator: Generator) -> list[Tensor]:
        """Return which of each client's m training samples are not flagged, bool ``[m]``.

        Args:
            data: the :class:`flsv.FederatedDataModule`, whose samples are assigned to clients.
            generator: generator of all random numbers.
        """


@checked
@dataclass(frozen=True)
class HeldOut:
    """Samples to hold out, chosen by their values in a column.

    A table's column becomes no feature unless the data dictionary names it.

    Args:
        column: name of a table's column, of a field of each sample, or of an attribute of the data set.
        values: value, or values, of the samples to hold out.
        since: date, as ``2024-03-31``. Samples of this date or a later one are held out.

    Raises:
        ConfigurationError: not exactly one of ``values`` and ``since`` is given, or the date cannot be read.

    Example:
        >>> HeldOut("admitted", since="2024-01-01").select(["2023-12-31", "2024-01-01", None]).tolist()
        [False, True, False]
    """

    rules: ClassVar[Rules] = (
        (lambda a: (a.values is None) != (a.since is None), "expected either values or since."),
    )

    column: str
    values: str | int | list[str] | list[int] | None = None
    since: str | None = None

    def __post_init__(self) -> None:
        if self.since is not None:
            date_text = str(self.since)  # YAML reads it as a number or a date
            object.__setattr__(self, "since", date_text)
            _date(date_text)  # raises an error for other texts

    def __str__(self) -> str:
        if self.since is not None:
            return f"{self.column} since {self.since}"
        return f"{self.column} = {listed(self._chosen_values())}"

    def select(self, column_values: Sequence[Any]) -> Tensor:
        """Return which samples are held out, bool ``[N]``, by their N values in the column.

        A sample without a value is not held out.

        Raises:
            ConfigurationError: a value is not a date, or no sample is held out.
        """
        words = _names_of(column_values)
        if self.since is None:
            is_held_out = self._have_chosen_values(words)
        else:
            is_held_out = self._dates(words) >= _date(self.since)
        if not is_held_out.any():
            words_present = sorted(set(words.dropna()))
            raise ConfigurationError(
                f"HeldOut({self}) holds out no sample. The values of {self.column!r} are "
                f"{listed(words_present, show=repr)}."
            )
        return torch.tensor(is_held_out.tolist(), dtype=torch.bool)

    def _dates(self, words: Any) -> Any:
        import pandas as pd

        dates = pd.to_datetime(words, format="ISO8601", errors="coerce", utc=True)
        not_dates = words[words.notna() & dates.isna()]
        if len(not_dates):
            raise ConfigurationError(
                f"HeldOut({self.column!r}, since={self.since!r}): the column has values that are not dates such as "
                f"2024-03-31: {listed(not_dates.unique().tolist(), show=repr)}. Correct them."
            )
        return dates

    def _have_chosen_values(self, words: Any) -> Any:
        """Return which texts are chosen. Warn of chosen values that no sample has if others are there."""
        chosen_words = set(_names_of(self._chosen_values()).dropna())
        is_chosen = words.isin(chosen_words)
        absent_words = sorted(chosen_words - set(words.dropna()))
        if absent_words and is_chosen.any():
            rank_zero_warn(
                f"HeldOut: no sample has {self.column!r} = {listed(absent_words, show=repr)}."
            )
        return is_chosen

    def _chosen_values(self) -> list[str]:
        values = self.values if isinstance(self.values, list) else [self.values]
        return [str(value).strip() for value in values]


def _names_of(values: Sequence[Any]) -> Any:
    """Return values as a Series of texts, with 17 for 17.0 and NaN for missing values."""
    import pandas as pd

    from flsv.data.column_texts import texts_of

    names = texts_of(pd.Series(list(values), dtype=object)).astype(object)
    return names.where(names != "")


def _date(text: str) -> Any:
    import pandas as pd

    try:
        return pd.to_datetime(text, format="ISO8601", utc=True)
    except ValueError as error:
        raise ConfigurationError(f"since={text!r}: expected a date such as 2024-03-31.") from error


#: How samples are held out: a number, a share, or by a column. The number comes first, since the command line reads 100
#: as the first type that fits.
Choice: TypeAlias = (
    Count
    | Annotated[
        float,
        Ge(0),
        Lt(1),
        "0.1 is 10 %, 100 is 100 samples, {column: split, values: test} is the samples with test in a column split.",
    ]
    | HeldOut
)


@checked
@dataclass(frozen=True)
class Splits:
    """Samples that are held out of training for evaluation, or removed.

    A held-out set is a share of the samples (``0.1``), a number of samples (``100``), or chosen by a column
    (:class:`HeldOut`). Shares and numbers are drawn from the samples that no column chooses, at least one unless 0.

    Args:
        server_val: samples of the training data that become the server's validation set, before the others are
            divided among the clients. 0.1: a tenth, 10: ten samples, 0: none. Not used if the source has its own
            validation data.
        client_val: samples of each client for its validation set. 0.1: a tenth, 10: ten samples.
        client_test: samples of each client for its test set.
        max_samples: size of the random subset of the samples that is used. None: all.
        drop_flagged: method that flags harmful training samples, such as :class:`flsv.valuation.FedBary`. These are
            removed. None: no sample is removed.
        seed: seed of all splits except the partition, whose seed is the partitioner's. None: the seed of
            ``seed_everything``.
        together: column whose value, such as a patient, says which samples belong together. No such group has samples
            both in training and in a held-out set.

    Raises:
        ConfigurationError: a share lies outside ``[0, 1)``, no sample is left for training, ``max_samples`` is below 1,
            or an argument has another type.

    Example:
        >>> Splits(client_test=1.0)
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: Splits(client_test=1.0): expected a whole number of at least 1 or a \
finite number in [0, 1) or a HeldOut. 0.1 is 10 %, 100 is 100 samples, {column: split, values: test} is the samples \
with test in a column split.
    """

    rules: ClassVar[Rules] = (
        (
            lambda a: _share(a.client_val) + _share(a.client_test) < 1,
            "client_val and client_test leave no sample for training. Their sum must be below 1.",
        ),
    )

    server_val: Choice = 0.1
    client_val: Choice = 0.0
    client_test: Choice = 0.0
    max_samples: Count | None = None
    drop_flagged: SampleFilter | None = None
    seed: int | None = None
    together: str | None = None

    def __post_init__(self) -> None:
        for name in HELD_OUT:
            if getattr(self, name) == 0:  # a resumed run compares texts, in which 0 and 0.0 differ
                object.__setattr__(self, name, 0.0)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns by which samples are held out or kept together."""
        names = [choice.column for choice in self.choices().values()]
        if self.together is not None:
            names.append(self.together)
        return tuple(dict.fromkeys(names))

    def choices(self) -> dict[str, HeldOut]:
        """Return the held-out sets that are chosen by a column."""
        choices = {}
        for name in HELD_OUT:
            choice = getattr(self, name)
            if isinstance(choice, HeldOut):
                choices[name] = choice
        return choices


def _share(choice: Choice) -> float:
    return choice if isinstance(choice, float) else 0.0


@dataclass(frozen=True)
class FederatedSplits:
    """Sorted indices, int64, of the server's validation samples and of each client's splits, and the clients' names."""

    server_val: Tensor
    clients: tuple[dict[str, Tensor], ...]
    names: tuple[str, ...]
    #: The number of each client's samples, int64 ``[n]``, that are in none of its splits, by the option that is the
    #: reason. Samples without an owner before the partition are not counted.
    left_out: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def train(self) -> list[Tensor]:
        """Each client's training samples, int64 ``[n]``."""
        return [client["train"] for client in self.clients]

    @property
    def num_left_out(self) -> dict[str, list[int]]:
        """Number of each client's samples that it does not train on, by the option that is the reason."""
        counts = {name: number.tolist() for name, number in self.left_out.items()}
        for part in ("val", "test"):
            counts[f"client_{part}"] = [len(client.get(part, ())) for client in self.clients]
        return {name: numbers for name, numbers in counts.items() if any(numbers)}

    @property
    def held_out(self) -> Tensor:
        """Validation and test samples of the server and all clients, int64 ``[n]``."""
        parts = [self.server_val]
        for client in self.clients:
            parts += [client["val"], client["test"]]
        return torch.cat(parts)


def split_federation(
    labels: Tensor,
    num_classes: int,
    groups: Tensor | None,
    pool: Tensor,
    partitioner: Partitioner,
    options: Splits,
    column: ColumnReader,
    group_names: Sequence[str] = (),
    whole: bool = False,
) -> FederatedSplits:
    """Divide the samples ``pool``, int64 ``[n]``, among the server and the clients.

    With ``whole``, each group has to keep a training sample. ``column`` reads the columns that the options name.
    """
    division = _Division(options, column)
    samples_used = pool
    if options.max_samples is not None:
        order = shuffled(pool, generator_for(options.seed, "max_samples"))
        samples_used = order[: options.max_samples]
    server_val, training_pool = division.split_server(samples_used)
    # Groups of which clients have the whole, such as hospitals.
    kept_groups = groups if partitioner.keeps_groups else None
    if kept_groups is not None:
        lost_groups = set(kept_groups[pool].tolist()) - set(kept_groups[training_pool].tolist())
        lost_names = [group_names[group] for group in sorted(lost_groups)]
        _check_none_lost(lost_names, options.max_samples, is_error=whole)

    groups_of_pool = None if groups is None else groups[training_pool]
    parts = partitioner(labels[training_pool], num_classes, groups_of_pool)
    samples_by_client = [training_pool[part] for part in parts]
    names = tuple(map(str, range(len(parts))))
    left_out = {}
    if kept_groups is not None:
        groups_by_client = [kept_groups[samples] for samples in samples_by_client]
        names = _names_of_clients(groups_by_client, group_names) or names
        count = partial(_count_by_client, kept_groups, groups_by_client)
        left_out["max_samples"] = count(pool) - count(samples_used)
        left_out["server_val"] = count(server_val)

    clients = []
    for client, samples in enumerate(samples_by_client, partitioner.first_client):
        clients.append(division.split_client(client, samples, names))
    splits = FederatedSplits(server_val, tuple(clients), names, left_out)
    division.check_groups(splits)
    return splits


def _check_none_lost(lost_names: Sequence[str], max_samples: int | None, is_error: bool) -> None:
    """Raise ConfigurationError, or warn, if groups have no training sample left."""
    if not lost_names:
        return
    message = (
        f"No training sample is left at {listed(lost_names, show=repr)}. All of them are in the "
        f"server's validation set, or were removed by max_samples={max_samples}. Give the server its "
        "own data (val), or set server_val: 0."
    )
    if is_error:
        raise ConfigurationError(message)
    rank_zero_warn(message)


def _count_by_client(groups: Tensor, groups_by_client: Sequence[Tensor], samples: Tensor) -> Tensor:
    """Count the ``samples`` that are of each client's groups, int64 ``[n]``."""
    num_by_group = torch.bincount(groups[samples], minlength=int(groups.max()) + 1)
    numbers = [num_by_group[client_groups.unique()].sum() for client_groups in groups_by_client]
    return torch.stack(numbers)


def _names_of_clients(groups: Sequence[Tensor], group_names: Sequence[str]) -> tuple[str, ...]:
    """Return the name of each client's group, or an empty tuple if a client has several groups."""
    names = []
    for groups_of_client in groups:
        distinct_groups = groups_of_client.unique().tolist()
        if len(distinct_groups) != 1:
            return ()
        names.append(group_names[distinct_groups[0]])
    return tuple(names)


class _Division:
    def __init__(self, options: Splits, column: ColumnReader) -> None:
        self._options = options
        self._held_out_masks: dict[str, Tensor] = {}  # bool [num_samples] by held-out set
        # int64 [num_samples], with one number for samples that belong together
        self._group_numbers: Tensor | None = None
        self._group_names: Sequence[str] = ()
        for name, choice in options.choices().items():
            self._held_out_masks[name] = choice.select(column(choice.column))
        self._check_overlaps()
        if options.together is not None:
            self._set_groups(column(options.together))

    def _set_groups(self, values: Sequence[Any]) -> None:
        names = _names_of(values)
        num_missing = int(names.isna().sum())
        if num_missing:
            raise ConfigurationError(
                f"Splits(together={self._options.together!r}): {num_missing} of {len(names)} samples have no value in "
                "this column, so that it is not known which samples belong together. Fill the values in, or "
                "remove these samples."
            )
        self._group_names, self._group_numbers = number_values(names.to_numpy(dtype=str))

    def _check_overlaps(self) -> None:
        for name, other_name in combinations(self._held_out_masks, 2):
            is_in_both = self._held_out_masks[name] & self._held_out_masks[other_name]
            if is_in_both.any():
                choice = getattr(self._options, name)
                other_choice = getattr(self._options, other_name)
                raise ConfigurationError(
                    f"Splits: {int(is_in_both.sum())} samples are both in {name} ({choice}) and in {other_name} "
                    f"({other_choice}). Choose different values."
                )

    def split_server(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sorted indices of the server's validation samples, and of all others."""
        options = self._options
        pool = shuffled(pool, generator_for(options.seed, "server_val"))
        num_held_out = _num_held_out(options.server_val, len(pool))
        if num_held_out == 0 and options.server_val:
            raise ConfigurationError(
                f"Splits(server_val={options.server_val}) holds out none of {len(pool)} samples. Raise server_val, or "
                "set it to 0 to train without validation."
            )
        is_held_out = self._is_held_out("server_val", pool, num_held_out)
        training_pool = pool[~is_held_out]
        if len(training_pool) == 0:
            raise ConfigurationError(
                f"Splits(server_val={options.server_val}) holds out all {len(pool)} samples, so that none is left for "
                "training. Lower server_val."
            )
        return pool[is_held_out].sort().values, training_pool.sort().values

    def split_client(self, client: int, samples: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the sorted indices of a client's training, validation and test samples."""
        options = self._options
        client_name = client_called(client, names, "Client")
        order = shuffled(samples, generator_for(options.seed, "client_split", client))
        # Held-out samples are drawn from the end: first the test set, then the validation set.
        remaining = order.flip(0)
        parts = {}
        for part, name in (("test", "client_test"), ("val", "client_val")):
            is_held_out = self._is_held_out_at_client(name, remaining, len(samples), client_name)
            parts[part] = remaining[is_held_out].sort().values
            remaining = remaining[~is_held_out]
        if len(remaining) == 0:
            raise ConfigurationError(
                f"{client_name} has {len(samples)} samples, of which client_val="
                f"{options.client_val} and client_test={options.client_test} leave none for training. Set these to 0, "
                "or use a partitioner that gives each client more samples (min_samples)."
            )
        return {"train": remaining.sort().values, "val": parts["val"], "test": parts["test"]}

    def _is_held_out_at_client(
        self, name: str, remaining: Tensor, num_samples: int, client_name: str
    ) -> Tensor:
        """Return which of a client's remaining samples are held out, at least one of its ``num_samples`` unless 0."""
        choice = getattr(self._options, name)
        num_held_out = _num_held_out(choice, num_samples)
        if choice:  # each client needs one, since mean scores are over all clients
            num_held_out = max(1, num_held_out)
        is_held_out = self._is_held_out(name, remaining, num_held_out)
        if isinstance(choice, HeldOut) and not is_held_out.any():
            raise ConfigurationError(
                f"{client_name} has no sample for {name} ({choice}), but other clients "
                "have. Hold out a share or a number of samples, or remove this client."
            )
        return is_held_out

    def check_groups(self, splits: FederatedSplits) -> None:
        """Raise ConfigurationError if samples that belong together are in training and in a held-out set."""
        if self._group_numbers is None:
            return
        train_groups = self._group_numbers[torch.cat(splits.train)].unique()
        held_out_groups = self._group_numbers[splits.held_out].unique()
        groups_in_both = train_groups[torch.isin(train_groups, held_out_groups)].tolist()
        if groups_in_both:
            names = [str(self._group_names[group]) for group in groups_in_both]
            raise ConfigurationError(
                f"Splits(together={self._options.together!r}): {len(names)} of {len(self._group_names)} groups have "
                f"samples both in training and in a held-out set: {listed(names, show=repr)}. Choose held-out samples "
                "that keep each group together, and give all samples of a group to one client (groups)."
            )

    def _is_held_out(self, name: str, samples: Tensor, num_held_out: int) -> Tensor:
        """Return which samples are held out by a column, or else the first that no column chooses, bool ``[n]``."""
        if name in self._held_out_masks:
            return self._held_out_masks[name][samples]
        is_free = torch.ones(len(samples), dtype=torch.bool)
        for is_chosen in self._held_out_masks.values():
            is_free &= ~is_chosen[samples]
        is_held_out = torch.zeros(len(samples), dtype=torch.bool)
        is_held_out[is_free] = self._is_in_first(samples[is_free], num_held_out)
        return is_held_out

    def _is_in_first(self, samples: Tensor, num_first: int) -> Tensor:
        """Return which samples are the first ``num_first``, extended to whole groups, bool ``[n]``."""
        if self._group_numbers is None:
            return torch.arange(len(samples)) < num_first
        groups = self._group_numbers[samples]
        group_sizes = torch.bincount(groups)
        # Groups are taken as a whole until they have enough samples.
        first_groups = []
        num_in_groups = 0
        for group in dict.fromkeys(groups.tolist()):  # in the order of the samples
            if num_in_groups >= num_first:
                break
            first_groups.append(group)
            num_in_groups += int(group_sizes[group])
        return torch.isin(groups, torch.tensor(first_groups, dtype=torch.long))


def _num_held_out(choice: Choice, num_samples: int) -> int:
    if isinstance(choice, HeldOut):
        return num_samples
    return int(choice * num_samples + 0.5) if isinstance(choice, float) else choice
