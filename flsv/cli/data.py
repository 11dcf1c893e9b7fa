"""``flsv data``: what each client has, before anything is trained.

    flsv data federation.yaml
    flsv data --config quickstart --data.source patients.csv --data.labels died

Shows, of what a configuration file of flsv fit says under data, each client's samples and classes, what became of each
column of a table, and what share of its values each client lacks; and says what there is to think of, such as a class
that is rare. The folder of --out gets the same as samples.csv and columns.csv, and summary.csv: pandas' description of
each column at each client. Nothing is trained, and no other section of the file is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import pandas as pd

from flsv.cli.command import shown
from flsv.cli.options import instantiated, option_parser
from flsv.data import FederatedDataModule
from flsv.utilities.atomic_files import check_writable
from flsv.utilities.errors import listed

#: A class that has at most this share is rare: a model that never finds it is right nearly always.
RARE = 0.2
READ_AS = "is read as"
#: So many classes, and clients of a table of columns, are shown each.
_SHOWN = 10


def samples(data: FederatedDataModule) -> pd.DataFrame:
    """Count each client's samples in every split, and the share of them that is of each class: a row per client."""
    frame = pd.DataFrame({"samples": data.num_samples.tolist()}, index=pd.Index(data.client_names, name="client"))
    for split, title in (("val", "own validation"), ("test", "own test")):
        # mypy: both are splits
        counts = [len(data.client_indices(client, split)) for client in range(data.num_clients)]  # type: ignore[arg-type]
        if any(counts):
            frame[title] = counts
    if data.no_classes is None:
        shares = (data.class_counts / data.num_samples[:, None]).T.tolist()
        for name, column in list(zip(data.class_names, shares))[:_SHOWN]:
            frame[name] = column
        if len(shares) > _SHOWN:
            frame["classes"] = (data.class_counts > 0).sum(1).tolist()
    return frame


def missing(data: FederatedDataModule) -> pd.DataFrame:
    """Compute which share of a client's training rows has no value: a row per column of a table, a column per client;
    before them, what the column ``is read as``."""
    rows = [data.client_indices(client).numpy() for client in range(data.num_clients)]
    shares = [[float(card.values.iloc[each].isna().mean()) for each in rows] for card in data.column_cards]
    names = [card.name for card in data.column_cards]
    frame = pd.DataFrame(shares, index=pd.Index(names, name="column"), columns=list(data.client_names))
    frame.insert(0, READ_AS, [card.became for card in data.column_cards])
    return frame


def describe_values(data: FederatedDataModule) -> pd.DataFrame:
    """Describe the values that a client trains on as pandas does: a row per column and client."""
    described = {
        (card.name, name): card.values.iloc[data.client_indices(client).numpy()].describe()
        for card in data.column_cards
        for client, name in enumerate(data.client_names)
    }
    return pd.DataFrame(described).T.rename_axis(["column", "client"])


def notes(data: FederatedDataModule) -> list[str]:
    """List what there is to think of before training, a sentence or two each."""
    found = []
    if data.no_classes is None and len(data.class_names) <= _SHOWN:
        counts = pd.DataFrame(data.class_counts.tolist(), index=data.client_names, columns=data.class_names)
        shares = counts.sum() / counts.sum().sum()
        rare = [f"{name} ({100 * share:.1f} %)" for name, share in shares.items() if share <= RARE]
        if rare and len(shares) <= 1 / RARE:
            found.append(
                f"Rare: {listed(rare)}. Accuracy says little. Measure by performance: auroc, average_precision or "
                "balanced_accuracy, and train with class_weights: balanced."
            )
        for name in counts:
            without = counts.index[counts[name] == 0]
            if len(without):
                found.append(f"No {name} to train on: {listed(without)}.")
    lacking = missing(data)
    for name, shares in lacking[lacking[READ_AS] != "left out"].drop(columns=READ_AS).iterrows():
        mostly = shares.index[shares - shares.min() > 0.5]
        if len(mostly):
            found.append(
                f"{name} is missing mostly at {listed(mostly)}: the model can tell by its gaps whose a row is."
            )
    return found


def show(data: FederatedDataModule) -> None:
    """Print all but the summary."""
    frame = samples(data)
    shares = frame.columns.difference(["samples", "own validation", "own test", "classes"])
    print(f"Training samples of each client\n\n{_in_percent(frame, shares).to_string(max_rows=40)}\n")
    held = data.validation()
    rows = "" if held is None or held["rows"] is None else f", {held['rows']:,} samples"
    print("The server has no validation set." if held is None else f"The server validates on {held['of']}{rows}.")
    if data.column_cards:
        lacking = missing(data).set_index(READ_AS, append=True)
        if len(lacking.columns) > _SHOWN:
            lacking = pd.DataFrame({"least": lacking.min(axis=1), "most": lacking.max(axis=1)})
        lacking = _in_percent(lacking, lacking.columns).add_prefix("missing, ").reset_index(READ_AS)
        print(f"\nColumns\n\n{lacking.to_string()}\n")
    for note in notes(data):
        print(note)


def _in_percent(frame: pd.DataFrame, columns: pd.Index) -> pd.DataFrame:
    return frame.assign(**{name: frame[name].map("{:.1%}".format).str.replace("%", " %") for name in columns})


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv data`` with the arguments that follow its name."""
    files = list(takewhile(lambda word: not word.startswith("-"), args))
    args = [*(f"--config={file}" for file in files), *args[len(files) :]]
    parser = option_parser("flsv data", __doc__, {"data": FederatedDataModule})
    parser.add_argument("--out", type=Path | None, help="folder of samples.csv, columns.csv and summary.csv")
    objects = instantiated(parser, args)
    out, data = objects.out, objects.data
    if out is not None:
        check_writable(out)
    data.prepare_data()
    data.setup("fit")
    if not quiet:
        show(data)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        samples(data).to_csv(out / "samples.csv")
        if data.column_cards:
            missing(data).to_csv(out / "columns.csv")
            describe_values(data).to_csv(out / "summary.csv")
        print(f"Written: {shown(out)}")
