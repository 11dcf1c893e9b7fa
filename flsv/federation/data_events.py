"""Events of data-quality warnings about clients' tables and samples, and the file of the tables' data dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from flsv.data import FederatedDataModule
from flsv.data.copies import SAMPLES, ValidationCopies, conspicuous, copies_in
from flsv.results.folder import DICTIONARY_FILE
from flsv.results.round_result import DATA_WARNING, OF_VALIDATION, Event
from flsv.utilities.atomic_files import replacing


def events_of_copies(
    data: FederatedDataModule, validation_copies: Sequence[ValidationCopies]
) -> list[Event]:
    """Return an event for each client that trains on validation samples, for each pair of clients with the same
    samples, and for each client with duplicate samples. Warn if there are any."""
    events = [
        Event(
            client=copies.client,
            what=DATA_WARNING,
            first=0,
            last=0,
            kind=OF_VALIDATION,
            column=SAMPLES,
            text=copies.text,
        )
        for copies in conspicuous(validation_copies)
    ]
    for copies in copies_in(data):
        other_clients = [] if copies.other_client is None else [copies.other_client]
        event = Event(
            client=copies.client,
            what=DATA_WARNING,
            first=0,
            last=0,
            others=other_clients,
            column=SAMPLES,
            text=copies.text(data.client_names),
        )
        events.append(event)
    if events:
        first_event = events[0]
        owner = "all clients"
        if first_event.client is not None:
            owner = data.client_names[first_event.client]
        further = f", and {len(events) - 1} more" if len(events) > 1 else ""
        rank_zero_warn(f"{SAMPLES} of {owner}: {first_event.text}{further}.")
    return events


def events_of_tables(data: FederatedDataModule) -> list[Event]:
    """Return one event for each data-quality warning about a federation's tables."""
    client_of_name = {name: client for client, name in enumerate(data.client_names)}
    events = []
    for data_warning in data.division.source.data_warnings:
        event = Event(
            client=client_of_name.get(data_warning.site),  # None: the server's tables
            what=DATA_WARNING,
            first=0,
            last=0,
            column=data_warning.column,
            text=data_warning.text,
        )
        events.append(event)
    return events


def write_dictionary(data: FederatedDataModule, folder: Path) -> None:
    """Write the data dictionary with which tables were read into a run's folder, for the next run or for sites."""
    if data.dictionary is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / DICTIONARY_FILE) as file:
        file.write(data.dictionary.to_text().encode())
