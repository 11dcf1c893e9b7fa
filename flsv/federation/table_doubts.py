"""Functions that record a table's data dictionary, and the doubts about it as events of a run."""

from __future__ import annotations

from pathlib import Path

from flsv.data import FederatedDataModule
from flsv.data.copies import STRONG_DOUBT
from flsv.results.folder import DICTIONARY_FILE
from flsv.results.round_result import DOUBT, Event
from flsv.utilities.atomic_files import replacing


def events_of_tables(data: FederatedDataModule) -> list[Event]:
    """Return one event for each doubt about a federation's tables."""
    client_of_name = {name: client for client, name in enumerate(data.client_names)}
    events = []
    for doubt in data.table_doubts:
        event = Event(
            client=client_of_name.get(doubt.site),  # None: it is about the server's tables
            what=DOUBT,
            first=0,
            last=0,
            column=doubt.column,
            text=doubt.text,
            strength=STRONG_DOUBT,
        )
        events.append(event)
    return events


def write_dictionary(data: FederatedDataModule, folder: Path) -> None:
    """Write the dictionary by which tables were read into a run's folder, for the next run or for sites."""
    if data.dictionary is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / DICTIONARY_FILE) as file:
        file.write(data.dictionary.to_text().encode())
