"""ClientValues: what a round's clients have made of the module's values that are not in the vector.

Floating-point values are averaged by samples where shapes agree. A list that clients have only made longer is a
record, as of an epoch's outputs: between two rounds it shows what all have added. Of everything else the next round
starts with the first client's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from flsv.training.module_snapshot import ModuleSnapshot, State, Values, write_state
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.plain_values import are_equal

_MISSING = object()


class ClientChanges(NamedTuple):
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
        self._first_client: ModuleSnapshot | State | None = None
        self._records: dict[str, _Record] = {}
        self._has_told = False

    def forget(self) -> None:
        """Forget a round's changes."""
        self._changes = []
        self._first_client = None

    def add(
        self,
        client: int,
        num_samples: int,
        *,
        before: ModuleSnapshot,
        after: ModuleSnapshot,
    ) -> None:
        """Add what a client has made of what it found ``before``."""
        if not self._changes:
            self._first_client = after
        changed_values = {}
        for path, value in after.values.items():
            found = before.values.get(path, _MISSING)
            if not are_equal(value, found):
                changed_values[path] = value
        self._changes.append(ClientChanges(client, num_samples, changed_values))

    def leave_out(self, clients: Collection[int]) -> None:
        """Forget excluded clients. Without the first one the state of the round's start stays."""
        if self._changes and self._changes[0].client in clients:
            self._first_client = None
        self._changes = [changes for changes in self._changes if changes.client not in clients]

    def exchanged(self) -> ExchangedValues:
        """Return this process's changes, for other processes."""
        first_client = self._first_client
        if isinstance(first_client, ModuleSnapshot):
            first_client = first_client.state()
        return self._changes, first_client

    def merge(self, parts: Sequence[ExchangedValues], clients: Sequence[int]) -> None:
        """Take the changes of all processes, in the order of ``clients``."""
        own_clients = {changes.client for changes in self._changes}
        changes_by_client = {}
        state_by_client = {}  # that of the first client of its process
        for changes_of_process, state in parts:
            for changes in changes_of_process:
                changes_by_client[changes.client] = changes
                state_by_client[changes.client] = state
        self._changes = [
            changes_by_client[client] for client in clients if client in changes_by_client
        ]
        if self._changes and self._changes[0].client not in own_clients:
            self._first_client = state_by_client[self._changes[0].client]

    def write(self, module: nn.Module, initial: ModuleSnapshot) -> ModuleSnapshot:
        """Write the values after a round into a module, given the snapshot with which clients have begun.

        Returns:
            A snapshot with the structure that the module has now.
        """
        first_client = self._first_client
        if not isinstance(first_client, dict):
            snapshot = first_client or initial
            snapshot.values = self._merged(snapshot.values, initial)
            snapshot.restore()
            return snapshot

        initial.restore()
        state = dict(first_client)
        for part in ("buffers", "attributes"):
            state[part] = self._merged(first_client[part], initial)
        lacking = write_state(module, state)
        if lacking:
            raise ConfigurationError(
                f"{listed(lacking)}: {type(module).__name__} makes this while a client trains, so that another process "
                "does not have it. Make it in __init__ or configure_model."
            )
        return ModuleSnapshot(module)

    def _merged(self, values: Values, initial: ModuleSnapshot) -> Values:
        """Return the first client's ``values`` with means, and with lists of what all have added."""
        merged_values = dict(values)
        changed_paths: set[str] = set()
        weights = []
        for changes in self._changes:
            changed_paths.update(changes.values)
            weights.append(changes.num_samples)

        paths_without_mean = []
        for path in sorted(changed_paths & values.keys()):
            initial_value = initial.values.get(path)
            of_clients = [changes.values.get(path, initial_value) for changes in self._changes]
            merged_values[path] = mean_of(
                of_clients,
                weights,
                # Often None until the first batch.
                initial=values[path] if initial_value is None else initial_value,
                default=values[path],
            )
            has_mean = not are_equal(merged_values[path], values[path])
            are_all_equal = all(are_equal(value, of_clients[0]) for value in of_clients)
            # Such as BatchNorm's counters.
            is_buffer = path in initial.buffers
            if not has_mean and not are_all_equal and not is_buffer:
                paths_without_mean.append(path)
        self._show_records(merged_values, initial.values)
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

    def hide_records(self, values: Values) -> bool:
        """Give lists in ``values`` the entries that clients find, in place. Return whether any has changed."""
        current_records = {}
        for path, entries in _lists_in(values).items():
            record = self._records.get(path)
            # With another length it is a new list, or a hook has changed it since the last round.
            if record is not None and len(entries) == len(record.entries_of_all):
                entries[:] = record.entries_of_first
                current_records[path] = record
        self._records = current_records
        return bool(current_records)

    def _show_records(self, values: Values, initial_values: Values) -> None:
        """Let each list that clients have only made longer hold what all have added, in place."""
        initial_lists = _lists_in(initial_values)
        lists_of_clients = [_lists_in(changes.values) for changes in self._changes]
        for path, entries in _lists_in(values).items():
            initial_entries = initial_lists.get(path, [])
            num_initial = len(initial_entries)
            additions = []
            is_record = True
            for lists in lists_of_clients:
                entries_of_client = lists.get(path, initial_entries)
                is_record &= are_equal(entries_of_client[:num_initial], initial_entries)
                additions += entries_of_client[num_initial:]

            record = self._records.pop(path, None)
            earlier_entries = initial_entries if record is None else record.entries_of_all
            entries_of_all = [*earlier_entries, *additions]
            if is_record and len(entries_of_all) > len(entries):
                self._records[path] = _Record(list(entries), entries_of_all)
                entries[:] = entries_of_all


class _Record(NamedTuple):
    """A list's entries, as clients find it and as hooks of the round's end find it."""

    entries_of_first: list[Any]
    entries_of_all: list[Any]


def _lists_in(values: Values) -> dict[str, list[Any]]:
    """Return the lists among plain values, and in dictionaries there, by path."""
    lists: dict[str, list[Any]] = {}
    pending = list(values.items())
    while pending:
        path, value = pending.pop()
        if type(value) is list:
            lists[path] = value
        elif isinstance(value, dict):
            for key, entry in value.items():
                pending.append((f"{path}[{key!r}]", entry))
    return lists


def mean_of(
    values: Sequence[Any],
    weights: Sequence[float],
    *,
    initial: Any,
    default: Any,
) -> Any:
    """Return the mean of floating-point values, and ``default`` for values that have no mean.

    Args:
        values: numbers, tensors, arrays, or lists, tuples and dictionaries of them.
        weights: one weight for each of the values.
        initial: the value from which all were made. With another type, length or shape there is no mean.
        default: the value in place of a mean.

    Example:
        >>> values = [{"mean": 1.0, "count": 3}, {"mean": 4.0, "count": 5}]
        >>> mean_of(values, [1, 2], initial={"mean": 0.0, "count": 0}, default=values[0])
        {'mean': 3.0, 'count': 3}
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]

    def mean_of_leaves(default_leaf: Any, *leaves: Any) -> Any:
        _, first, *others = leaves
        formats = {_format_of(leaf) for leaf in (default_leaf, *leaves)}
        if len(formats) > 1 or not _has_floats(first):
            return default_leaf
        if all(are_equal(other, first) for other in others):  # to the bit
            return first
        mean = first * shares[0]
        for other, share in zip(others, shares[1:]):
            mean = mean + other * share
        return mean

    try:
        return tree_map(mean_of_leaves, default, initial, *values)
    except ValueError:  # they have other keys or lengths
        return default


def _format_of(leaf: Any) -> tuple[Any, ...]:
    shape = getattr(leaf, "shape", None)
    dtype = getattr(leaf, "dtype", None)
    return type(leaf), shape, dtype


def _has_floats(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return np.issubdtype(np.asarray(value).dtype, np.inexact)
