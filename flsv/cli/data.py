"""``flsv data``: what each client has, before anything is trained.

    flsv data federation.yaml
    flsv data --config quickstart --data.source patients.csv --data.labels died

Shows, of what a configuration file of flsv fit says under data, each client's samples and classes, what became of each
column of a table, and what share of its values each client lacks; and says what there is to think of, such as a class
that is rare. The folder of --out gets a card for each client, which it may have, in Markdown, and columns.csv. Nothing
is trained, and no other section of the file is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from flsv._lightning.durable import check_writable
from flsv.cli.command import shown
from flsv.cli.options import option_parser
from flsv.csv_files import save_csv
from flsv.data import FederatedDataModule
from flsv.errors import listed
from flsv.participants.artifacts import client_folders
from flsv.report.terminal import chosen, make_console, print_table

#: A class that has at most this share is rare: a model that never finds it is right nearly always.
RARE = 0.2
_CLASSES, _COLUMNS = 10, 10


class Cards:
    """What each client of a data module has.

    Args:
        data: set up.
    """

    def __init__(self, data: FederatedDataModule) -> None:
        self.data, self.names = data, data.client_names
        self.columns = data.column_cards
        #: Share of each column's values that each client lacks, ``[columns][n]``, in the rows that it trains on.
        self.missing = [
            [float(card.missing[data.client_indices(client).numpy()].mean()) for client in range(len(self.names))]
            for card in self.columns
        ]

    def samples(self) -> dict[str, list[str]]:
        """Header to cells: how many samples each client has for what, and which share is of each class."""
        data, clients = self.data, range(len(self.names))
        cells = {"samples": [f"{count:,}" for count in data.num_samples.tolist()]}
        for split, title in (("val", "own validation"), ("test", "own test")):
            counts = [len(data.client_indices(client, split)) for client in clients]  # type: ignore[arg-type]
            cells |= {title: [f"{count:,}" for count in counts]} if any(counts) else {}
        if data.no_classes is None:
            shares = data.class_counts / data.num_samples[:, None]
            named = list(zip(data.class_names, shares.T.tolist()))
            cells |= {name: [f"{100 * share:.1f} %" for share in column] for name, column in named[:_CLASSES]}
            if len(named) > _CLASSES:
                cells["classes"] = [str(count) for count in (data.class_counts > 0).sum(1).tolist()]
        return cells

    def lacking(self) -> dict[str, list[str]]:
        """Header to cells, a row for each column of the table: what it became, and what share of it is missing."""
        cells = {"is read as": [card.became for card in self.columns]}
        if len(self.names) <= _COLUMNS:
            return cells | {
                f"missing, {name}": [_share(row[i]) for row in self.missing] for i, name in enumerate(self.names)
            }
        return cells | {
            "missing, least": [_share(min(row)) for row in self.missing],
            "missing, most": [f"{_share(max(row))} ({self.names[row.index(max(row))]})" for row in self.missing],
        }

    def notes(self) -> list[str]:
        """What there is to think of before training, a sentence or two each."""
        data, notes = self.data, []
        if data.no_classes is None:
            counts = data.class_counts
            shares = (counts.sum(0) / counts.sum()).tolist()
            rare = [f"{name} ({100 * share:.1f} %)" for name, share in zip(data.class_names, shares) if share <= RARE]
            if rare and len(shares) <= 1 / RARE:
                notes.append(
                    f"Rare: {listed(rare)}. Accuracy says little. Measure by performance: auroc, average_precision "
                    "or balanced_accuracy, and train with class_weights: balanced."
                )
            for name, column in zip(data.class_names, counts.T.tolist()):
                without = [client for client, count in zip(self.names, column) if not count]
                if without and len(shares) <= _CLASSES:
                    notes.append(f"No {name} to train on: {listed(without)}.")
        for card, row in zip(self.columns, self.missing):
            least, most = min(row), max(row)
            if card.became != "left out" and most - least > 0.5:
                there = [name for name, share in zip(self.names, row) if share - least > 0.5]
                notes.append(
                    f"{card.name} is missing mostly at {listed(there)}: the model can tell by its gaps whose a row is."
                )
        return notes

    def card(self, client: int) -> str:
        """One client's card, Markdown."""
        rows = {header: cells[client] for header, cells in self.samples().items()}
        lines = [f"# {self.names[client]}", "", "| | |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows.items())]
        if self.columns:
            lines += ["", "| column | is read as | missing here | missing at all |", "|---|---|---|---|"]
            weights = (self.data.num_samples / self.data.num_samples.sum()).tolist()
            for card, row in zip(self.columns, self.missing):
                everywhere = sum(share * weight for share, weight in zip(row, weights))
                lines.append(f"| {card.name} | {card.became} | {_share(row[client])} | {_share(everywhere)} |")
        return "\n".join([*lines, ""])

    def show(self) -> None:
        """Print all."""
        console, data = make_console(), self.data
        rows, gap = chosen(data.num_samples.tolist(), len(self.names))
        print_table(console, "What each client trains on", self.names, self.samples(), rows, gap)
        held = data.validation()
        print("The server has nothing to validate on." if held is None else f"The server validates on {_told(held)}.")
        if self.columns:
            print_table(console, "Columns", [card.name for card in self.columns], self.lacking(), corner="column")
        for note in self.notes():
            print(note)

    def write(self, out: Path) -> None:
        """A card for each client, and ``columns.csv``."""
        out.mkdir(parents=True, exist_ok=True)
        for client, folder in enumerate(client_folders(self.names)):
            (out / f"{folder}.md").write_text(self.card(client), encoding="utf-8")
        if self.columns:
            header = ["column", "is read as", *self.names]
            rows = zip(self.columns, self.missing)
            save_csv(
                out / "columns.csv", [header, *([c.name, c.became, *(f"{x:.6g}" for x in row)] for c, row in rows)]
            )


def _told(held: Mapping[str, Any]) -> str:
    return f"{held['of']}" + ("" if held["rows"] is None else f", {held['rows']:,} samples")


def _share(share: float) -> str:
    return "" if share == 0 else f"{100 * share:.1f} %"


def main(args: Sequence[str], quiet: bool = False) -> None:
    """The command line, without ``data`` itself."""
    files = list(takewhile(lambda word: not word.startswith("-"), args))
    args = [*(f"--config={file}" for file in files), *args[len(files) :]]
    parser = option_parser("flsv data", __doc__, {"data": FederatedDataModule})
    parser.add_argument("--out", type=str | None, help="folder of the cards and of columns.csv")
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # before jsonargparse 4.49
    objects = instantiate(parser.parse_args(args))
    if objects.out is not None:
        check_writable(Path(objects.out))
    objects.data.prepare_data()
    objects.data.setup("fit")
    cards = Cards(objects.data)
    if not quiet:
        cards.show()
    if objects.out is not None:
        cards.write(Path(objects.out))
        print(f"Cards: {shown(Path(objects.out))}")
