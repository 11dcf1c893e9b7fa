"""ClientValues: merges the module's values outside the model vector after the clients have trained in a round.

Floating-point values of equal shapes are averaged, weighted by samples. A list to which clients have only appended,
such as an epoch's outputs, gets the items of all clients. All other values are those of the round's first client.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.utils._pytree import tree_map

from flsv.training.module_snapshot import ModuleSnapshot, SnapshotState, ValuesByPath, write_state
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.plain_values import are_equal, has_floats

_MISSING = object()


class ClientChanges(NamedTuple):
    """The values that a client has changed, by path, and if it is the cohort's first client, its complete state."""

    client: int
    num_samples: int
    values: ValuesByPath
    complete_state: ModuleSnapshot | SnapshotState | None


class ClientValues:
    """Values of a module that the clients of a round have changed."""

    def __init__(self) -> None:
        self._changes: list[ClientChanges] = []
        # Paths of values that differ between clients and have no mean, after the last round.
        self._paths_without_mean: list[str] = []
        self._has_informed = False
        self._has_warned_of_logs = False
        self._has_warned = False

    def forget(self) -> None:
        self._changes = []

    def add(
        self, client: int, num_samples: int, *, initial: ModuleSnapshot, trained: ModuleSnapshot
    ) -> None:
        """Store the values that a client's training has changed."""
        changed_values = {}
        for path, value in trained.values.items():
            if path in initial.buffers and not has_floats(value):
                continue  # the first client's value is used, and a comparison would wait for the device
            initial_value = initial.values.get(path, _MISSING)
            is_unchanged = value is initial_value or are_equal(value, initial_value)
            if not is_unchanged:
                changed_values[path] = value
        is_first_client = not self._changes
        changes = ClientChanges(
            client,
            num_samples,
            values=changed_values,
            complete_state=trained if is_first_client else None,
        )
        self._changes.append(changes)

    def exclude(self, clients: Collection[int]) -> None:
        """Drop the changes of clients. Without the first client, values that have no mean do not change."""
        self._changes = [changes for changes in self._changes if changes.client not in clients]

    def changes_to_send(self) -> list[ClientChanges]:
        """Return changes for other processes."""
        sent_changes = []
        for changes in self._changes:
            state = changes.complete_state
            sent_state = state.state() if isinstance(state, ModuleSnapshot) else None
            sent_changes.append(changes._replace(complete_state=sent_state))
        return sent_changes

    def merge(self, parts: Sequence[list[ClientChanges]], clients: Sequence[int]) -> None:
        """Take the changes of all processes, in the order of ``clients``."""
        # This process's changes come last: for the first client they have the snapshot, which is not sent.
        all_changes = [*chain.from_iterable(parts), *self._changes]
        changes_by_client = {changes.client: changes for changes in all_changes}
        self._changes = []
        for client in clients:
            if client in changes_by_client:
                changes = changes_by_client[client]
                if self._changes:  # only the first client's state is kept
                    changes = changes._replace(complete_state=None)
                self._changes.append(changes)

    def write(self, module: nn.Module, initial: ModuleSnapshot) -> ModuleSnapshot:
        """Write the values after a round into a module, given the snapshot with which clients have begun.

        Returns:
            A snapshot with the structure that the module has now.
        """
        state_of_first_client = self._changes[0].complete_state if self._changes else None
        if isinstance(state_of_first_client, dict):  # this client has trained in another process
            return self._write_sent_state(module, initial, state_of_first_client)

        snapshot = state_of_first_client or initial  # None: no client has trained
        self._warn_once(module, _changed_structure(initial, snapshot))
        snapshot.values = self._merged(snapshot.values, initial)
        snapshot.restore()
        return snapshot

    def _write_sent_state(
        self, module: nn.Module, initial: ModuleSnapshot, sent_state: SnapshotState
    ) -> ModuleSnapshot:
        """Write the values after a round, given the first client's state that another process has sent."""
        initial.restore()
        merged_state = dict(sent_state)
        for part in ("buffers", "attributes"):
            merged_state[part] = self._merged(sent_state[part], initial)
        missing = write_state(module, merged_state)
        if missing:
            raise ConfigurationError(
                f"{type(module).__name__} creates parts while a client trains, which other processes do not have: "
                f"{listed(missing)}. Create them in __init__ or configure_model."
            )
        return ModuleSnapshot(module)

    def _merged(self, first_client_values: ValuesByPath, initial: ModuleSnapshot) -> ValuesByPath:
        """Return the first client's values by path, with all clients' means where these exist."""
        merged_values = dict(first_client_values)
        changed_paths: set[str] = set()
        for changes in self._changes:
            changed_paths.update(changes.values)
        self._paths_without_mean = []
        for path in sorted(changed_paths & first_client_values.keys()):
            first_value = first_client_values[path]
            initial_value = initial.values.get(path)
            # A client that has not changed the value still has the initial one.
            clients_values = [changes.values.get(path, initial_value) for changes in self._changes]
            mean = self._mean(clients_values, initial_value, first_value)
            merged_values[path] = mean
            is_buffer = path in initial.buffers  # such as BatchNorm's counters
            if not is_buffer and _has_no_mean(clients_values, first_value, mean):
                self._paths_without_mean.append(path)
        return merged_values

    def _mean(self, clients_values: list[Any], initial_value: Any, first_value: Any) -> Any:
        """Return the clients' mean of one value, or the first client's value if there is none."""
        weights = [changes.num_samples for changes in self._changes]
        # An attribute that was None before the first batch is merged as if it began with the first client's value.
        if initial_value is None:
            initial_value = first_value
        return merged_value(clients_values, weights, initial=initial_value, default=first_value)

    def describe_once(self, module: nn.Module, logged_names: Sequence[str]) -> None:
        """Warn about values without a mean if the module has logged ``logged_names`` at the round's end."""
        paths = self._paths_without_mean
        if not paths:
            return
        differences = f"flsv: clients end a round with different values of {listed(paths)}"
        if logged_names and not self._has_warned_of_logs:
            self._has_warned_of_logs = True
            rank_zero_warn(
                f"{differences}. At the end of the epoch {type(module).__name__} has the values of the round's first "
                f"client only, and it logs {listed(logged_names)} there, which may be computed from them. To log a "
                "value over all clients, update a torchmetrics object, append to a list, or call "
                "self.log(name, value, on_step=False, on_epoch=True) in training_step."
            )
        elif not logged_names and not self._has_informed:
            self._has_informed = True
            rank_zero_info(
                f"{differences}, which have no mean. All clients start the next round with the values of this round's "
                "first client. If validation or forward reads them, results depend on the order of the clients."
            )

    def _warn_once(self, module: nn.Module, paths: Sequence[str]) -> None:
        if paths and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"flsv: training replaces layers, hooks or functions of {type(module).__name__}: {listed(paths)}. The "
                "next round starts with those of the first client. Create them in __init__ or configure_model."
            )


def _changed_structure(initial: ModuleSnapshot, trained: ModuleSnapshot) -> list[str]:
    """Return the paths of layers, parameters and functions that training has replaced."""
    changed_paths = []
    # A snapshot describes each layer and parameter by a flag and a text, such as "Linear with 0 hooks".
    for path, (_, description) in trained.structure.items():
        _, initial_description = initial.structure.get(path, [None, "missing"])
        is_replaced = trained.owners[path] is not initial.owners.get(path)
        if is_replaced or description != initial_description:
            changed_paths.append(path or "the module")
    for path, attribute in trained.originals.items():
        is_function = callable(attribute) and path not in trained.values
        if is_function and attribute is not initial.originals.get(path):
            changed_paths.append(path)
    return changed_paths


def _has_no_mean(clients_values: list[Any], first_value: Any, mean: Any) -> bool:
    """Return whether clients have different values, and the first one's is used in place of a mean."""
    if not are_equal(mean, first_value):
        return False
    return any(not are_equal(first_value, value) for value in clients_values)


def merged_value(
    values: Sequence[Any], weights: Sequence[float], *, initial: Any, default: Any
) -> Any:
    """Return the mean of floating-point values, or all items that have been added to a list.

    Args:
        values: each client's value: numbers, tensors, arrays, or lists, tuples and dictionaries of them.
        weights: one weight for each of the values.
        initial: the value before the clients trained. With another type, length or shape there is no mean.
        default: the value in place of a mean.

    Example:
        >>> values = [{"mean": 1.0, "losses": [2.0]}, {"mean": 4.0, "losses": [3.0]}]
        >>> merged_value(values, [1, 2], initial={"mean": 0.0, "losses": []}, default=values[0])
        {'mean': 3.0, 'losses': [2.0, 3.0]}
    """
    merge = partial(_merged_leaf, weights)
    try:
        return tree_map(merge, default, initial, *values, is_leaf=_is_list)
    except ValueError:  # they have other keys or lengths
        return default


def _merged_leaf(weights: Sequence[float], default: Any, initial: Any, *values: Any) -> Any:
    """Merge each client's value of one leaf of a tree: a number, a tensor, an array or a list."""
    if type(default) is list:
        return _merged_list(values, weights, initial=initial, default=default)
    formats = {_format_of(value) for value in (default, initial, *values)}
    has_mean = len(formats) == 1 and has_floats(default)
    if not has_mean:
        return default

    first_value = values[0]
    if all(are_equal(first_value, value) for value in values):
        return first_value  # a mean would be rounded
    total_weight = sum(weights)
    mean = 0.0
    for value, weight in zip(values, weights):
        mean = mean + value * (weight / total_weight)
    return mean


def _merged_list(
    lists: Sequence[Any], weights: Sequence[float], *, initial: Any, default: list[Any]
) -> list[Any]:
    """Merge each client's list: all added items if lists have only grown, else item by item."""
    if not all(_is_list(items) for items in (initial, *lists)):
        return default
    num_initial = len(initial)
    have_only_grown = all(are_equal(items[:num_initial], initial) for items in lists)
    if have_only_grown:
        added_items = chain.from_iterable(items[num_initial:] for items in lists)
        return [*initial, *added_items]

    if any(len(items) != num_initial for items in (default, *lists)):
        return default
    merged_items = []
    for index, default_item in enumerate(default):
        clients_items = [items[index] for items in lists]
        merged_item = merged_value(
            clients_items, weights, initial=initial[index], default=default_item
        )
        merged_items.append(merged_item)
    return merged_items


def _is_list(value: Any) -> bool:
    return type(value) is list


def _format_of(leaf: Any) -> tuple[Any, ...]:
    shape = getattr(leaf, "shape", None)
    dtype = getattr(leaf, "dtype", None)
    return type(leaf), shape, dtype
