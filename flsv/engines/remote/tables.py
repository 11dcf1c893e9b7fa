"""Agreement of sites on one encoder of their tables, before the first round."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from flsv.data import FederatedDataModule
from flsv.data.sources.agreed import AgreedEncoder, TableSummary
from flsv.engines.remote.messages import (
    GARBLED_REPLY_ERRORS,
    BadReply,
    Packet,
    Refused,
    Reply,
    check_done,
    fault_of,
)
from flsv.utilities.atomic_files import replacing
from flsv.utilities.errors import ConfigurationError, listed

#: Name of the question in which a site tells about its table, as a site's policy may list it.
TABLE_SUMMARY = "flsv.engines.remote.tables:table_summary"
#: Files beside the book: the encoder of the sites' tables, and the doubts about these.
ENCODER_FILE = "encoder.json"
DOUBTS_FILE = "doubts.csv"
#: What a site says of its table before there is an encoder.
NO_ENCODER = "waits"


def table_summary(data: FederatedDataModule, min_rows: int) -> TableSummary:
    """Return what a site tells about its table.

    Args:
        data: the site's data.
        min_rows: smallest number of rows of which the site's policy lets it tell.

    Raises:
        Refused: the site would tell of fewer rows, or its table cannot be read. The reason names no value.
    """
    try:
        summary = data.table_summary()
    except ConfigurationError as error:
        raise Refused(
            "its table cannot be read. Its own log names the columns, and options of columns that help"
        ) from error
    summary_min_rows = summary.settings["columns"]["min_rows"]
    if summary_min_rows < min_rows:
        raise Refused(
            f"its policy lets it tell of {min_rows} rows and more (min_rows), and its columns have "
            f"min_rows={summary_min_rows}. Set columns: {{min_rows: {min_rows}}} everywhere"
        )
    return summary


def take_encoder(
    data: FederatedDataModule,
    packet: Packet,
    configured: AgreedEncoder | None,
    private: bool,
) -> None:
    """Encode a site's table by the encoder in a packet, unless it has one by its ``configured`` columns.

    Raises:
        Refused: that fails, with a reason that names no value, or the site's updates are ``private``.
    """
    plain_encoder = packet.plain.get("encoder")
    encoder = None
    if plain_encoder is not None:
        encoder = AgreedEncoder.from_plain(plain_encoder)
    if configured is not None:  # the data module has this encoder already
        is_another = encoder is not None and encoder != configured
        if is_another:
            raise Refused("its columns have another encoder than the server's")
        return
    if private and (encoder is not None or data.needs_encoder):
        raise Refused(
            "its updates are private, and what it tells about its table would have no noise. Give all sites the same "
            "scales and categories, such as columns: {encoder: {columns: {age: {mean: 60, scale: 15}, "
            "ward: {categories: [A, B]}}, classes: ['no', 'yes']}}"
        )

    try:
        data.encode(encoder)
    except ConfigurationError as error:
        raise Refused(
            "its table does not fit the encoder on which the sites agreed. Its own log names the row or column. "
            "Classes that too few rows of each site have must be named, columns: {classes: [...]}"
        ) from error


def state_of_table(data: FederatedDataModule) -> str | None:
    """Return the hash of the encoder of a site's table, :data:`NO_ENCODER` without one, or None without a table."""
    if data.needs_encoder:
        return NO_ENCODER
    if data.encoder is None:
        return None
    return data.encoder.hash


def read_state(plain: Mapping[str, Any]) -> str | None:
    """Read the :func:`state_of_table` from a site's greeting."""
    state = plain.get("table")
    if state is not None and (not isinstance(state, str) or len(state) > 12):
        raise BadReply(f"it says of its table {state!r:.80}")
    return state


def check_states(states: Mapping[str, str | None]) -> None:
    """Raise ConfigurationError unless all sites have tables that are encoded alike, or none has a table.

    ``states`` has the :func:`state_of_table` by the site's name.
    """
    sites_by_state: dict[str | None, list[str]] = {}
    for site, state in states.items():
        sites_by_state.setdefault(state, []).append(site)
    if len(sites_by_state) < 2:
        return

    descriptions = []
    for state, sites in sites_by_state.items():
        if state is None:
            description = "no table"
        elif state == NO_ENCODER:
            description = "a table without an encoder"
        else:
            description = f"a table with encoder {state}"
        descriptions.append(f"{listed(sites)}: {description}")
    raise ConfigurationError(
        f"The sites' data differ: {'; '.join(descriptions)}. Give all sites tables, and all or none of them "
        "the same encoder in columns."
    )


def summaries_of_replies(
    replies: Mapping[str, Reply],
    num_rows: Mapping[str, int],
) -> dict[str, TableSummary]:
    """Return what all sites have told about their tables.

    Args:
        replies: each site's reply, by its name.
        num_rows: each site's announced number of training rows.

    Raises:
        ConfigurationError: a site does not answer. The message says what to do.
    """
    summaries = {}
    for site, reply in replies.items():
        try:
            content = check_done(reply).plain
            summary = TableSummary.from_plain(content["summary"])
            _check_rows(summary, num_rows[site])
        except GARBLED_REPLY_ERRORS as error:
            raise ConfigurationError(
                f"site {site!r} has not told of its table: {fault_of(error)}. All sites are needed to agree on an "
                "encoder. Mend it, and start this server again."
            ) from error
        summaries[site] = summary
    return summaries


def agree_on_encoder(
    summaries: Mapping[str, TableSummary],
    num_rows: Mapping[str, int],
    folder: Path,
) -> AgreedEncoder:
    """Make one encoder for all sites' tables, and write it and the doubts about the tables into a folder.

    Raises:
        ConfigurationError: the tables do not fit together. The message says what to do.
    """
    # Only who has tables needs pandas.
    import pandas as pd

    from flsv.data.sources.summaries import encoder_of_sites
    from flsv.data.sources.summary_doubts import doubts_of_summaries

    encoder = encoder_of_sites(summaries)
    rows = []
    for doubt in doubts_of_summaries(summaries, num_rows):
        rows.append((doubt.strength, doubt.site, doubt.column, doubt.text))
    doubts = pd.DataFrame(rows, columns=["strength", "site", "column", "doubt"])
    with replacing(folder / DOUBTS_FILE) as file:
        file.write(doubts.to_csv(index=False).encode())
    if rows:
        table = doubts[["column", "site", "doubt"]].to_string(index=False)
        rank_zero_warn(
            f"Doubts about the sites' tables, the worst first: ask the sites\n\n{table}\n"
        )

    with replacing(folder / ENCODER_FILE) as file:
        file.write(json.dumps(encoder.to_plain(), indent=1).encode())
    return encoder


def _check_rows(summary: TableSummary, num_rows: int) -> None:
    """Raise BadReply if a column has more rows than the site has announced."""
    for name, column in summary.columns.items():
        # Each row is missing, a number, or a category's.
        num_rows_of_column = column.missing
        if column.moments is not None:
            num_rows_of_column += column.moments.count
        if column.categories is not None:
            num_rows_of_column += sum(column.categories.values())
        if num_rows_of_column > num_rows:
            shown_name = f"{name!r:.80}"
            raise BadReply(
                f"it tells of {num_rows_of_column} rows in {shown_name}, and has {num_rows}"
            )


def read_encoder(path: Path) -> AgreedEncoder | None:
    """Read the encoder on which sites have agreed, or return None if there is no such file."""
    if not path.is_file():
        return None
    try:
        return AgreedEncoder.from_plain(json.loads(path.read_bytes()))
    except ValueError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error!s:.200}. Delete the run's folder, and start anew."
        ) from error


def packet_of_summary(summary: TableSummary) -> Packet:
    """Make the packet in which a site tells about its table."""
    return Packet("agreed", {"summary": summary.to_plain()})
