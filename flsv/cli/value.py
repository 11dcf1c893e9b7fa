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
from torch import Tensor

from flsv.cli.command import display_path
from flsv.cli.options import instantiated, option_parser
from flsv.core.artifacts import client_folders
from flsv.data import FederatedDataModule
from flsv.results.terminal import print_table, shown_clients
from flsv.results.text import numbers
from flsv.utilities.atomic_files import check_writable
from flsv.utilities.charts import drawing
from flsv.utilities.csv_files import save_table
from flsv.utilities.seeding import generator_for
from flsv.valuation import FedBary, Valuation, participants_of, write_flagged
from flsv.valuation.fedbary import draw_contributions, histograms_of


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
    """Value the clients of a data module, print a table and write ``valuation.csv`` and figures.

    Each client's flagged samples are listed in ``out/clients/<name>/flagged.csv``, see
    :func:`flsv.valuation.write_flagged`.

    Args:
        data: the data module, set up or not.
        valuer: the method of valuation.
        out: the folder of the files.
        seed: seed of the random points with which the protocol starts. None: the seed of ``seed_everything``.
        validation: whether to use the server's validation set, if there is one. False: use the clients' barycenter.
        device: the device on which features are computed, such as ``"cuda"`` for a backbone.
        table: whether to print the table.

    Returns:
        The clients' distances, shares and flagged samples.
    """
    data.prepare_data()
    data.setup("fit")
    clients, server = participants_of(data, device)
    start = time.perf_counter()
    found = valuer.value(clients, server if validation else None, generator_for(seed, "value"))
    seconds = time.perf_counter() - start
    out.mkdir(parents=True, exist_ok=True)
    names = data.client_names
    cells = {name: column.tolist() for name, column in valuation_columns(found).items()}
    rounded = {
        name: [f"{x:.6g}" if isinstance(x, float) and x == x else x for x in cells[name]]
        for name in cells
    }
    save_table(
        out / "valuation.csv",
        DataFrame({"client": range(len(names)), **rounded, "client_name": names}),
    )
    for name, draw in (("contributions", draw_contributions), ("gradients", histograms_of)):
        with drawing(f"{out / name}.png"):
            draw(found, names).savefig(out / f"{name}.png")
    folders = client_folders(names)
    for client in clients:
        own = out / "clients" / folders[client.id]
        client.ask(write_flagged, own, data.client_indices(client.id, "train"), data.class_names)
    if table:
        target = (
            "the server's validation set"
            if validation and server is not None
            else "the clients' barycenter"
        )
        title = f"Valuation against {target}, S = {found.support}, {seconds:.1f} s"
        shown = {name: numbers(column) for name, column in cells.items()}
        print_table(title, names, shown, shown_clients(found.shares, len(names)))
    return found


def valuation_columns(found: Valuation) -> dict[str, Tensor]:
    """Return the columns of the valuation's table, ``{name: values [n]}``."""
    columns = {
        "samples": found.samples + found.broken,
        "distance": found.distances,
        "share": found.shares,
    }
    columns |= {"flagged": found.flagged, "flagged_share": found.flagged_shares}
    return columns | ({"not_finite": found.broken} if found.broken.any() else {})


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv value`` with the command-line arguments ``args``."""
    parser = option_parser("flsv value", __doc__, {"data": FederatedDataModule, "value": FedBary})
    options = parser.add_function_arguments(value, as_group=False, skip={"data", "valuer", "table"})
    objects = instantiated(parser, args)
    check_writable(objects.out)
    value(objects.data, objects.value, table=not quiet, **{name: objects[name] for name in options})
    print(f"Results: {display_path(objects.out)} (valuation.csv, contributions.png, gradients.png)")
    if not quiet:
        print(f"Each client's samples: {display_path(objects.out / 'clients')}/<name>/flagged.csv")
