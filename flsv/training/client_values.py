"""ClientValues: what a round's clients have made of the module's values that are not in the vector.

Floating-point values are averaged by samples where shapes agree. A list that clients have only made longer is a
record, as of an epoch's outputs: between two rounds it shows what all have added. Of everything else the next round
starts with the first client's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from flsv.training.module_snapshot import ModuleSnapshot, State, Values, lists_in, write_state
from flsv.utilities.errors import listed
from flsv.utilities.plain_values import are_equal

_MISSING = object()


@dataclass(frozen=True)
class ClientChanges:
    """The values that a client has changed, by path."""

    client: int
    num_samples: int
    values: Values


#: A process's changes, and the state of its first client, in a form that can be sent to other processes.
ExchangedValues = tuple[list[ClientChanges], State | None]


class ClientValues:
    """What the clients of a round make of a module's values."""

    def __init__(self) -> None:
        self._changes: list[ClientChanges] = []
        # The state of the cohort's first client: of this process, or of another one.
        self._first: ModuleSnapshot | State | None = None
        self._records: dict[str, _Record] = {}
        self._has_told = False

    def forget(self) -> None:
        """Forget a round's changes."""
        self._changes = []
        self._first = None

    def add(
        self,
        client: int,
        num_samples: int,
        *,
        start: ModuleSnapshot,
        end: ModuleSnapshot,
    ) -> None:
        """Add what a client has made of the round's ``start``."""
        if not self._changes:
            self._first = end
        changed_values = {}
        for path, value in end.values.items():
            value_at_start = start.values.get(path, _MISSING)
            if value is not value_at_start and not are_equal(value, value_at_start):
                changed_values[path] = value
        self._changes.append(ClientChanges(client, num_samples, changed_values))

    def leave_out(self, clients: Collection[int]) -> None:
        """Forget excluded clients. Without the first one the state of the round's start stays."""
        if self._changes and self._changes[0].client in clients:
            self._first = None
        kept_changes = []
        for changes in self._changes:
            if changes.client not in clients:
                kept_changes.append(changes)
        self._changes = kept_changes

    def exchanged(self) -> ExchangedValues:
        """Return this process's changes, for other processes."""
        first = self._first
        if isinstance(first, ModuleSnapshot):
            first = first.state()
        return self._changes, first

    def merge(self, parts: Sequence[ExchangedValues], clients: Sequence[int]) -> None:
        """Take the changes of all processes, in the order of ``clients``."""
        own_clients = {changes.client for changes in self._changes}
        changes_by_client = {}
        first_by_client: dict[int, State | None] = {}
        for changes_of_process, first in parts:
            for changes in changes_of_process:
                changes_by_client[changes.client] = changes
                first_by_client.setdefault(changes_of_process[0].client, first)
        self._changes = [
            changes_by_client[client] for client in clients if client in changes_by_client
        ]
        if self._changes and self._changes[0].client not in own_clients:
            self._first = first_by_client[self._changes[0].client]

    def write(self, module: nn.Module, start: ModuleSnapshot) -> None:
        """Write the values after a round into a module, given the snapshot ``start`` of the round."""
        start.restore()
        first = self._first
        if isinstance(first, dict):
            state = dict(first)
            for part in ("buffers", "attributes"):
                state[part] = self._merged(first[part], start)
            write_state(module, state, is_resumed=False)
        else:
            snapshot = first or start
            snapshot.values = self._merged(snapshot.values, start)
            snapshot.restore()

    def _merged(self, values: Values, start: ModuleSnapshot) -> Values:
        """Return the first client's ``values`` with means, and with lists of what all have added."""
        merged_values = dict(values)
        changed_paths: set[str] = set()
        weights = []
        for changes in self._changes:
            changed_paths.update(changes.values)
            weights.append(changes.num_samples)

        paths_without_mean = []
        common_paths = start.values.keys() & values.keys()
        for path in sorted(changed_paths & common_paths):
            value_at_start = start.values[path]
            of_clients = []
            for changes in self._changes:
                of_clients.append(changes.values.get(path, value_at_start))
            merged_values[path] = mean_of(
                of_clients,
                weights,
                start=value_at_start,
                other=values[path],
            )
            has_mean = merged_values[path] is not values[path]
            if has_mean or _are_all_equal(of_clients):
                continue
            if path not in start.buffers:  # such as BatchNorm's counters
                paths_without_mean.append(path)
        self._show_records(merged_values, start.values)
        self._tell_once(paths_without_mean)
        return merged_values

    def _tell_once(self, paths: Sequence[str]) -> None:
        """Name values that differ between clients and have no mean."""
        record_names = {path.partition("[")[0] for path in self._records}
        names = [path for path in paths if path not in record_names]
        if names and not self._has_told:
            self._has_told = True
            rank_zero_info(
                f"flsv: clients end a round with different values of {listed(names)}, which have no mean. The next "
                "round starts with those of the cohort's first client. Where validation or forward reads them, the "
                "order of the clients matters."
            )

    # ---- lists that grow

    def begin_clients(self, start: ModuleSnapshot) -> None:
        """Let clients find the lists of the cohorts' first clients."""
        hidden_paths = self.hide_records(start.values)
        self._records = {path: self._records[path] for path in hidden_paths}
        if hidden_paths:
            start.restore()

    def hide_records(self, values: Values) -> list[str]:
        """Give lists in ``values`` the entries that clients find, in place. Return their paths."""
        paths: list[str] = []
        if not self._records:
            return paths
        for path, entries in lists_in(values).items():
            record = self._records.get(path)
            # With another length it is a new list, or a hook has changed it since the last round.
            if record is not None and len(entries) == len(record.entries_of_all):
                entries[:] = record.entries_of_first
                paths.append(path)
        return paths

    def _show_records(self, values: Values, start: Values) -> None:
        """Let each list that clients have only made longer hold what all have added, in place."""
        lists_at_start = lists_in(start)
        lists_of_clients = [lists_in(changes.values) for changes in self._changes]
        for path, entries in lists_in(values).items():
            entries_at_start = lists_at_start.get(path, [])
            num_at_start = len(entries_at_start)
            additions = []
            is_record = True
            for lists in lists_of_clients:
                entries_of_client = lists.get(path, entries_at_start)
                is_record &= are_equal(entries_of_client[:num_at_start], entries_at_start)
                additions += entries_of_client[num_at_start:]

            record = self._records.pop(path, None)
            if not is_record:
                continue
            earlier_entries = entries_at_start if record is None else record.entries_of_all
            entries_of_all = [*earlier_entries, *additions]
            if len(entries_of_all) > len(entries):
                self._records[path] = _Record(list(entries), entries_of_all)
                entries[:] = entries_of_all


class _Record(NamedTuple):
    """A list's entries, as clients find it and as hooks of the round's end find it."""

    entries_of_first: list[Any]
    entries_of_all: list[Any]


def mean_of(
    values: Sequence[Any],
    weights: Sequence[float],
    *,
    start: Any,
    other: Any,
) -> Any:
    """Return the mean of floating-point values, and ``other`` for values that have no mean.

    Args:
        values: numbers, tensors, arrays, or lists, tuples and dictionaries of them.
        weights: one weight for each of the values.
        start: the value from which all were made. With another type, length or shape there is no mean.
        other: the value in place of a mean.

    Example:
        >>> values = [{"mean": 1.0, "count": 3}, {"mean": 4.0, "count": 5}]
        >>> mean_of(values, [1, 2], start={"mean": 0.0, "count": 0}, other=values[0])
        {'mean': 3.0, 'count': 3}
    """
    leaves, spec = tree_flatten(other)
    leaves_of_values = []
    for value in (start, *values):
        if isinstance(other, list) and len(value) != len(other):  # mostly, and faster
            return other
        leaves_of_value, spec_of_value = tree_flatten(value)
        if spec_of_value != spec:
            return other
        leaves_of_values.append(leaves_of_value)

    means = []
    for leaf, start_and_values in zip(leaves, zip(*leaves_of_values)):
        start_leaf, *value_leaves = start_and_values
        mean = _mean_of_leaves(value_leaves, weights, start_leaf, leaf)
        means.append(mean)
    if all(map(is_, means, leaves)):
        return other
    return tree_unflatten(means, spec)


def _mean_of_leaves(
    values: Sequence[Any],
    weights: Sequence[float],
    start: Any,
    other: Any,
) -> Any:
    values_and_start = [start, *values]
    if set(map(type, values_and_start)) != {type(other)}:
        return other
    is_array = isinstance(other, Tensor | np.ndarray)
    if is_array:
        shapes = {value.shape for value in values_and_start}
        dtypes = {value.dtype for value in values_and_start}
        has_one_format = len(shapes) == len(dtypes) == 1
        if not has_one_format or not _has_floats(start):
            return other
    elif not isinstance(other, float | np.floating):
        return other
    if _are_all_equal(values):  # to the bit
        return values[0]

    total: Any = 0.0
    for value, weight in zip(values, weights):
        total = total + weight * _widened(value, start)
    mean = total / sum(weights)
    if isinstance(other, Tensor):
        return mean.to(other.dtype)
    if isinstance(other, np.ndarray):
        return mean.astype(other.dtype)
    return type(other)(mean)


def _widened(value: Any, start: Any) -> Any:
    """Return a value with 64 bits an entry, a tensor on the device of ``start``."""
    if isinstance(value, Tensor):
        wide_dtype = torch.promote_types(value.dtype, torch.float64)
        return value.to(start.device, wide_dtype)
    if isinstance(value, np.ndarray):
        wide_type = np.promote_types(value.dtype, np.float64)
        return value.astype(wide_type)
    return float(value)


def _has_floats(value: Tensor | np.ndarray) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return np.issubdtype(value.dtype, np.inexact)


def _are_all_equal(values: Sequence[Any]) -> bool:
    return all(are_equal(value, values[0]) for value in values)
