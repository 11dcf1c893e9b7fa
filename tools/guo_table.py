"""Guo et al.'s comparison (Sensors 2024, section 5): five scenarios x ten ways to say what a client is worth.

    python tools/guo_table.py [--root DATA] [--workers 2] [--out FILE.md] [--images docs/images]
    python tools/guo_table.py --all                         data that nothing was chosen on, too
    python tools/guo_table.py --full --root DATA            all images of a class that the smallest has, for a GPU
    python tools/guo_table.py --full --short --root DATA    every cell of it for one round, on a CPU

MNIST and Fashion-MNIST, softmax regression and LeNet5, five clients as in ``configs/scenarios/guo_*.yaml``. One run of
DivergenceWeighted gives the paper's values, one of FedAvg those of the baselines that rebuild sub-models (OR, SOR, MR,
TMR); exact, TMC and K-subset retrain coalitions and share one table of them (softmax regression only, unless --full or
--retrain). Accuracies are those of the run's own model on the test set. Tables 2 and 3 are the gain in accuracy over
FedAvg by a and b, figure 2 the accuracy of models trained alone by how far their labels are from equal ones.
Further experiments look for the gain in accuracy, in class-ordered batches and a larger step, and try the values
without the division by the round's sum on data on which it was not chosen ("held out").
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from guo_federation import NETWORKS, SHORT, cells
from guo_report import Results, draw_all, report
from table_presets import Preset, main
from table_runs import Cell


def preset(images: Path | None = None, retrain: Sequence[str] = ("softmax",)) -> Preset:
    """The table; its images are drawn with the report."""

    def written(results: Results, run: Sequence[Cell]) -> str:
        if images is not None:
            draw_all(results, images)
        return report(results, run)

    return Preset("guo", partial(cells, retrain=retrain), written, SHORT, asked=("held out",))


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--images", type=Path, help="folder for the figures guo_SOURCE.png")
    own.add_argument(
        "--retrain", nargs="*", default=["softmax"], choices=NETWORKS, help="networks to retrain coalitions of"
    )
    options, rest = own.parse_known_args(sys.argv[1:])
    main(preset(options.images, options.retrain), __doc__, rest)
