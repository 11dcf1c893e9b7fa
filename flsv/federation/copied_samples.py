"""Functions that record copies among the clients' samples as events of a run."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_warn

from flsv.data import FederatedDataModule
from flsv.data.copies import SAMPLES, copies_in
from flsv.results.round_result import DOUBT, Event


def events_of_copies(data: FederatedDataModule) -> list[Event]:
    """Return one event for two clients with the same samples, or for a client with some twice, and warn of them."""
    all_copies = copies_in(data)
    events = []
    for copies in all_copies:
        other_clients = [] if copies.other_client is None else [copies.other_client]
        event = Event(
            client=copies.client,
            what=DOUBT,
            first=0,
            last=0,
            others=other_clients,
            kind="twice" if copies.other_client is None else "shared",
            column=SAMPLES,
            text=copies.text(data.client_names),
            strength=copies.strength,
        )
        events.append(event)
    if events:
        first_event = events[0]
        client_name = data.client_names[all_copies[0].client]
        further = f", and {len(events) - 1} more" if len(events) > 1 else ""
        rank_zero_warn(f"{SAMPLES} of {client_name}: {first_event.text}{further}.")
    return events
