"""ShapFed's figures 3 and 5 to 8 and tables 1 and 2 (Tastan et al., IJCAI 2024), on what is at hand.

    python tools/shapfed_table.py [--root DATA] [--workers 2] [--out FILE.md] [--images docs/images]
    python tools/shapfed_table.py --all                           Fashion-MNIST, too
    python tools/shapfed_table.py --full --root DATA              the paper's networks and rounds, for a GPU
    python tools/shapfed_table.py --full --short --root DATA      every cell of it for one round, on a CPU
    python tools/shapfed_table.py --columns "figure 3"            no data needed

Figure 3: class-specific Shapley values (CSSV) and true class-wise Shapley values of four clients with four classes in
two blocks. Figure 5: CSSV and CGSV against the true Shapley values of five hospitals with chest X-rays. Figure 6: CSSV
on CIFAR-10, heterogeneous. Figures 7 and 8: accuracies on the way. Tables: balanced accuracy of each client's model on
the test set, training alone and with each algorithm, and collaborative fairness; once for the models that the clients
trained in the last round, since the paper's FedAvg rows differ between clients, and once for those they then receive.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shapfed_federation import cells, short
from shapfed_report import Results, draw, report
from table_presets import Preset, main
from table_runs import Cell


def preset(images: Path | None = None) -> Preset:
    """The table; its images are drawn with the report."""

    def written(results: Results, run: Sequence[Cell]) -> str:
        if images is not None:
            draw(results, images)
        return report(results, run)

    return Preset("shapfed", cells, written, short, asked=("Fashion-MNIST",))  # which is not in the paper


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--images", type=Path, help="folder for the figures")
    options, rest = own.parse_known_args(sys.argv[1:])
    main(preset(options.images), __doc__, rest)
