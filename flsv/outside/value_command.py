"""flsv value: the value of clients and of their samples, before anything is
trained.

    flsv value --config digits --config value

No model is trained. The command computes the Wasserstein distance of every
client's data from the server's validation set (without one, from the clients'
barycenter), contribution shares, and the samples that the clients flag as
suspicious. Only the sections data and value of a configuration file of flsv
fit are read. Li et al., "Data Valuation and Detections in Federated Learning"
(FedBary), CVPR 2024.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pandas import DataFrame

from flsv.cli.command import display_path
from flsv.cli.options import instantiated, option_parser
from flsv.core import Client
from flsv.core.artifacts import client_folders
from flsv.data import FederatedDataModule
from flsv.results.terminal import print_table, shown_clients
from flsv.results.text import format_numbers
from flsv.utilities.atomic_files import check_writable
from flsv.utilities.csv_files import save_table
from flsv.utilities.seeding import generator_for
from flsv.valuation import FedBary, Valuation, participants_of, write_flagged


def value(
    data: FederatedDataModule,
    valuer: FedBary,
    out: Path = Path("runs/value"),
    *,
    seed: int | None = None,
    validation: bool = True,
    device: str = "cpu",
    table: bool = True,
) -> Valuation:
    """Value the clients of a data module, print a table and write ``valuation.csv``.

    Each client's flagged samples are listed in ``out/clients/<name>/flagged.csv``, see
    :func:`flsv.valuation.write_flagged`.

    Args:
        data: the data module, set up or not.
        valuer: the method of valuation.
        out: the folder of the files.
        seed: seed of the random points with which the protocol begins. None: the seed of ``seed_everything``.
        validation: whether to use the server's validation set, if there is one. False: use the clients' barycenter.
        device: the device on which features are computed, such as ``"cuda"`` for a backbone.
        table: whether to print the table.

    Returns:
        The clients' distances, shares and flagged samples.
    """
    data.prepare_data()
    data.setup("fit")
    clients, server = participants_of(data, device)
    start_time = time.perf_counter()
    if not validation:
        server = None
    target = "the server's validation set"
    if server is None:
        target = "the clients' barycenter"
    valuation = valuer.value(clients, server, generator_for(seed, "value"))
    seconds = time.perf_counter() - start_time

    columns = valuation_columns(valuation)
    _write_files(out, columns, clients, data)
    if table:
        title = f"Valuation against {target}, S = {valuation.support}, {seconds:.1f} s"
        _print_columns(title, columns, data.client_names)
    return valuation


def _print_columns(title: str, columns: DataFrame, names: Sequence[str]) -> None:
    texts = {name: format_numbers(column) for name, column in columns.items()}
    rows = shown_clients(columns["share"], len(names))
    print_table(title, names, texts, rows)


def _write_files(
    out: Path, columns: DataFrame, clients: Sequence[Client], data: FederatedDataModule
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    _write_columns(out / "valuation.csv", columns, data.client_names)
    folders = client_folders(data.client_names)
    for client in clients:
        client_folder = out / "clients" / folders[client.id]
        train_indices = data.client_indices(client.id, "train")
        client.request(write_flagged, client_folder, train_indices, data.class_names)


def _write_columns(path: Path, columns: DataFrame, names: Sequence[str]) -> None:
    rounded = columns.copy()
    for name in columns.select_dtypes(float):
        numbers = columns[name]
        rounded[name] = numbers.map("{:.6g}".format, na_action="ignore")
    rounded.insert(0, "client", range(len(names)))
    rounded["client_name"] = list(names)
    save_table(path, rounded)


def valuation_columns(valuation: Valuation) -> DataFrame:
    """Return the valuation's table, with a row per client."""
    columns = {
        "samples": valuation.samples + valuation.broken,
        "distance": valuation.distances,
        "share": valuation.shares,
        "flagged": valuation.flagged,
        "flagged_share": valuation.flagged_shares,
    }
    if valuation.broken.any():
        columns["not_finite"] = valuation.broken
    numbers = {name: column.tolist() for name, column in columns.items()}
    return DataFrame(numbers)


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv value`` with the command-line arguments ``args``."""
    sections = {"data": FederatedDataModule, "value": FedBary}
    parser = option_parser("flsv value", __doc__, sections)
    other_arguments: set[str | int] = {"data", "valuer", "table"}
    options = parser.add_function_arguments(value, as_group=False, skip=other_arguments)
    objects = instantiated(parser, args)
    check_writable(objects.out)
    chosen_options = {name: objects[name] for name in options}
    value(
        objects.data,
        valuer=objects.value,
        table=not quiet,
        **chosen_options,
    )
    print(f"Results: {display_path(objects.out)} (valuation.csv)")
    if not quiet:
        folder = display_path(objects.out / "clients")
        print(f"Each client's samples: {folder}/<name>/flagged.csv")
