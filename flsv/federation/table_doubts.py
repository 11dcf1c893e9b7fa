"""Functions that record the doubts about the clients' tables as events of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from flsv.data import FederatedDataModule
from flsv.data.doubts import Doubt, doubts_of, warn_of_doubts
from flsv.results.round_result import DOUBT, Event


def events_of_tables(data: FederatedDataModule, file_of_sites: Path) -> list[Event]:
    """Return one event for each doubt about a federation's tables, the strongest first, and warn of strong ones.

    Args:
        data: the federation's data.
        file_of_sites: the file of a server whose sites have told it about their tables. The server has warned.
    """
    if data.column_cards:
        doubts = doubts_of(data)
        warn_of_doubts(doubts)
    else:
        doubts = []
        for row in pd.read_csv(file_of_sites, keep_default_na=False).itertuples():
            doubts.append(Doubt(row.strength, row.doubt, site=row.site, column=row.column))
    return doubt_events(doubts, data.client_names)


def doubt_events(
    doubts: Sequence[Doubt],
    client_names: Sequence[str],
) -> list[Event]:
    """Return one event for each doubt about a federation's tables, the strongest first."""
    client_of_name = {name: client for client, name in enumerate(client_names)}
    events = []
    for doubt in doubts:
        event = Event(
            client_of_name.get(doubt.site),  # None: it is about all sites
            DOUBT,
            first=0,
            last=0,
            kind=doubt.kind,
            column=doubt.column,
            text=doubt.text,
            strength=doubt.strength,
        )
        events.append(event)
    return events
