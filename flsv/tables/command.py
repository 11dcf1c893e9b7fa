"""flsv data: each client's samples, classes and columns, before anything is
trained.

    flsv data --config federation.yaml
    flsv data --config quickstart --data.source patients.csv --data.labels died

Reads the section "data" of a configuration of flsv fit. Shows each client's
samples and classes, how each column of a table is read, and the share of each
client's values that are missing. Data warnings name columns that differ from
the other clients', such as numbers in another unit, samples that occur more
than once, and validation samples that are training samples. Notes name
problems: a rare class, rows that repeat another one of the same client, a
column with one value, and one that alone tells the label. Nothing is trained,
and other sections of the file are ignored, but every image file is opened.

With --write, the data dictionary of the tables is inferred and written into
this file. A site infers its own with --data.partitioner OneClient, and

    flsv data --merge boston.yaml lyon.yaml --write dictionary.yaml

merges the dictionaries of several sites and prints where they differ. All
sites and the server need the merged dictionary.
With --out, the folder gets the tables samples.csv, columns.csv and
data_warnings.csv.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from flsv.cli.command import display_path
from flsv.cli.options import instantiated, option_parser
from flsv.data import FederatedDataModule
from flsv.data.copies import SAMPLES, conspicuous, copies_in, validation_copies_in
from flsv.data.sources.names_and_paths import unreadable_images
from flsv.results.terminal import filled, width
from flsv.tables.checks import notes_on_table
from flsv.tables.dictionary import Dictionary
from flsv.tables.merger import merge
from flsv.tables.source import OpenQuestions
from flsv.utilities.atomic_files import check_writable, replacing
from flsv.utilities.csv_files import save_table
from flsv.utilities.errors import ConfigurationError, listed

#: A class with at most this fraction of the samples is rare: a model that never predicts it has a high accuracy.
RARE_FRACTION = 0.2
READ_AS = "is read as"
_HOW_TO_ANSWER = (
    "You can exclude a column in the merged dictionary: delete the question mark at the beginning of its reason. All "
    "other questions are answered by each site in its own dictionary. Then all sites run flsv data --write again, and "
    "you merge again."
)
#: Largest number of classes, of columns for clients, and of data warnings that are printed.
_MAX_SHOWN = 10


def sample_table(data: FederatedDataModule) -> pd.DataFrame:
    """Return a table of each client's numbers of samples, and the fractions of its classes."""
    clients = pd.Index(data.client_names, name="client")
    frame = pd.DataFrame({"samples": data.num_samples.tolist()}, index=clients)
    titles: dict[Literal["val", "test"], str] = {"val": "own validation", "test": "own test"}
    for split, title in titles.items():
        counts = [len(data.client_indices(client, split)) for client in range(data.num_clients)]
        if any(counts):
            frame[title] = counts
    if data.no_classes is None:
        fractions = data.class_counts / data.num_samples[:, None]  # [n, M]
        for label, class_name in enumerate(data.class_names[:_MAX_SHOWN]):
            frame[class_name] = fractions[:, label].tolist()
        if data.num_classes > _MAX_SHOWN:
            has_class = data.class_counts > 0
            frame["classes"] = has_class.sum(1).tolist()
    return frame


def missing_table(data: FederatedDataModule) -> pd.DataFrame:
    """Return a table of each column's features, and the fraction of its values that are missing at each client."""
    cards = data.division.source.columns
    column_names = pd.Index([card.name for card in cards], name="column")
    frame = pd.DataFrame(index=column_names)
    frame[READ_AS] = [card.read_as for card in cards]
    for client, name in enumerate(data.client_names):
        rows = data.client_indices(client).numpy()
        fractions = [float(card.is_missing[rows].mean()) for card in cards]
        frame[name] = fractions
    return frame


def describe_positive_class(data: FederatedDataModule) -> str:
    """Return a sentence that names the positive class, or says how to name it."""
    if data.needs_pos_label:
        names = " or ".join(data.class_names)
        return f"Positive class: not known. Set data.pos_label to {names} before you use average precision or F1."
    return f"Positive class: {data.positive_class}, class 1. Average precision and F1 are scores of this class."


def notes_on_data(data: FederatedDataModule) -> list[str]:
    """Return notes on classes that are rare, or missing at a client."""
    if data.no_classes is not None or len(data.class_names) > _MAX_SHOWN:
        return []
    counts = pd.DataFrame(
        data.class_counts.tolist(), index=data.client_names, columns=data.class_names
    )
    texts = []
    rare_classes = _rare_classes(counts.sum())
    if rare_classes:
        texts.append(
            f"Rare: {listed(rare_classes)}. A model that never predicts a rare class has a high accuracy. Use "
            "performance: auroc, average_precision or balanced_accuracy, and train with class_weights: balanced."
        )
    for name in counts:
        clients_without = counts.index[counts[name] == 0]
        if len(clients_without):
            texts.append(f"No training sample has the class {name} at {listed(clients_without)}.")
    return texts


def _rare_classes(class_sizes: pd.Series) -> list[str]:
    """Describe the classes that are rare. Of many classes none is, since even equal fractions would be small."""
    if len(class_sizes) > 1 / RARE_FRACTION:
        return []
    fractions = class_sizes / class_sizes.sum()
    rare_fractions = fractions[fractions <= RARE_FRACTION]
    return [f"{name} ({100 * fraction:.1f} %)" for name, fraction in rare_fractions.items()]


def show(data: FederatedDataModule, data_warnings: pd.DataFrame) -> None:
    """Print the tables of samples and columns, the server's validation set, data warnings, and notes."""
    frame = sample_table(data)
    columns_of_counts = ["samples", "own validation", "own test", "classes"]
    columns_of_fractions = frame.columns.difference(columns_of_counts)
    text = _in_percent(frame, columns_of_fractions).to_string(max_rows=40, line_width=width())
    print(f"Training samples of each client\n\n{text}\n")
    print(_describe_validation(data))
    if data.division.source.columns:
        print(f"\nColumns, and the share of values that are missing\n\n{_shown_columns(data)}\n")
    if len(data_warnings):
        _print_data_warnings(data_warnings)
    if data.positive_class is not None:
        print(describe_positive_class(data))
    for note in (*notes_on_data(data), *notes_on_table(data)):
        print(filled(note))


def _describe_validation(data: FederatedDataModule) -> str:
    validation_set = data.validation()
    if validation_set is None:
        return "The server has no validation set."
    rows = validation_set["rows"]
    count = "" if rows is None else f", {rows:,} samples"
    return f"The server validates on {validation_set['of']}{count}."


def _print_data_warnings(data_warnings: pd.DataFrame) -> None:
    first_warnings = data_warnings.head(_MAX_SHOWN)[["column", "site", "data_warning"]]
    count_note = ""
    if len(data_warnings) > _MAX_SHOWN:
        count_note = f" ({_MAX_SHOWN} of {len(data_warnings)})"
    print(f"Data warnings{count_note}: ask the sites\n\n{first_warnings.to_string(index=False)}\n")


def _shown_columns(data: FederatedDataModule) -> str:
    """Return the table of columns in percent, with the least and the most instead of many clients, or of clients that
    do not fit into the terminal.
    """
    fractions = missing_table(data).set_index(READ_AS, append=True)
    table = _table_of_columns(fractions)
    widest_line = max(map(len, table.splitlines()))
    terminal_width = width()
    is_too_wide = terminal_width is not None and widest_line > terminal_width
    if len(fractions.columns) > _MAX_SHOWN or is_too_wide:
        extremes = {"least": fractions.min(axis=1), "most": fractions.max(axis=1)}
        return _table_of_columns(pd.DataFrame(extremes))
    return table


def _table_of_columns(fractions: pd.DataFrame) -> str:
    percentages = _in_percent(fractions, fractions.columns)
    return percentages.reset_index(READ_AS).to_string()


def check_images(data: FederatedDataModule) -> None:
    """Raise ConfigurationError if image files cannot be read, since a fit would end at the first of them."""
    validation_loader = data.val_dataloader()
    validation_set = getattr(validation_loader, "dataset", None)
    errors = unreadable_images(
        data.division.source.train, validation_set, data.division.source.test
    )
    if errors:
        raise ConfigurationError(f"{len(errors)} image files cannot be read: {listed(errors, 4)}")


def _in_percent(frame: pd.DataFrame, columns: pd.Index) -> pd.DataFrame:
    columns_of_texts = {}
    for name in columns:
        percentages = 100 * frame[name]
        columns_of_texts[name] = percentages.map("{:.1f} %".format)
    return frame.assign(**columns_of_texts)


def write_dictionary(file: Path, dictionary: Dictionary | None) -> None:
    """Write a data dictionary into a file, and print its questions."""
    if dictionary is None:
        raise ConfigurationError(
            "--write: only tables have a data dictionary, and these data are not a table. Set data.labels to the "
            "column to predict."
        )
    with replacing(file) as stream:
        stream.write(dictionary.to_text().encode())
    print(f"Written: {display_path(file)}.")
    for question in dictionary.questions:
        print(filled(f"? {question}"))
    print("Read and correct it, then set data.dictionary to this file.")


def merge_files(site_files: Sequence[Path], merged_file: Path | None) -> None:
    """Merge several sites' dictionaries, and print where they differ."""
    dictionary_by_site = {file.stem: Dictionary.from_file(file) for file in site_files}
    if len(dictionary_by_site) < 2 or len(dictionary_by_site) < len(site_files):
        names = listed(file.name for file in site_files)
        raise ConfigurationError(
            f"--merge: expected at least 2 files with different names, each named after its site, but got {names}."
        )
    dictionary, data_warnings = merge(dictionary_by_site)
    for data_warning in data_warnings:
        print(filled(str(data_warning)))
    if merged_file is None:
        for question in dictionary.questions:
            print(filled(f"? {question}"))
    else:
        write_dictionary(merged_file, dictionary)
    if dictionary.questions:
        print(filled(_HOW_TO_ANSWER))


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv data`` with the command-line arguments ``args``."""
    objects = instantiated(_parser(), args)
    data = objects.data
    if objects.out is not None:
        check_writable(objects.out)
    if objects.write is not None:
        check_writable(objects.write.parent)
    if objects.merge:
        merge_files(objects.merge, objects.write)
        return
    data.prepare_data()
    try:
        data.setup("fit")
    except OpenQuestions as questions:
        if objects.write is None:
            raise
        write_dictionary(objects.write, questions.dictionary)
        return
    check_images(data)
    if objects.write is not None:
        write_dictionary(objects.write, data.dictionary)
    _show_and_save(data, objects.out, quiet)


def _show_and_save(data: FederatedDataModule, out: Path | None, quiet: bool) -> None:
    data_warnings = data_warning_table(data)
    if not quiet:
        show(data, data_warnings)
    if out is not None:
        _save_tables(out, data, data_warnings)


def _parser() -> Any:
    parser = option_parser("flsv data", __doc__, {"data": FederatedDataModule})
    parser.add_argument(
        "--out",
        type=Path | None,
        help="folder of samples.csv, columns.csv and data_warnings.csv",
    )
    parser.add_argument(
        "--write",
        type=Path | None,
        help="file into which the inferred data dictionary is written, for data.dictionary",
    )
    parser.add_argument(
        "--merge",
        action="extend",
        type=Path,
        nargs="+",
        default=[],
        help="files of the sites' data dictionaries, each named after its site",
    )
    return parser


def _save_tables(folder: Path, data: FederatedDataModule, data_warnings: pd.DataFrame) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_table(folder / "samples.csv", sample_table(data).reset_index())
    if data.division.source.columns:
        save_table(folder / "columns.csv", missing_table(data).reset_index())
    if len(data_warnings):
        save_table(folder / "data_warnings.csv", data_warnings)
    print(f"Written: {display_path(folder)}")


def data_warning_table(data: FederatedDataModule) -> pd.DataFrame:
    """Return a table of the data warnings about tables, about validation samples that are training samples, and about
    samples that occur more than once."""
    rows = []
    for data_warning in data.division.source.data_warnings:
        rows.append((data_warning.site, data_warning.column, data_warning.text))
    for validation_copies in conspicuous(validation_copies_in(data) or ()):
        site = ""
        if validation_copies.client is not None:
            site = data.client_names[validation_copies.client]
        rows.append((site, SAMPLES, validation_copies.text))
    for copies in copies_in(data):
        client_name = data.client_names[copies.client]
        rows.append((client_name, SAMPLES, copies.text(data.client_names)))
    return pd.DataFrame(rows, columns=["site", "column", "data_warning"])
