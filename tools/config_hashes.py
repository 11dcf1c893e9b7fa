"""What every shipped configuration computes, as hashes: to see that a change changes nothing.

    python tools/config_hashes.py --out before.json     # on the version before
    python tools/config_hashes.py --against before.json # on the version after; exit status 1 where something differs

Every file of ``configs/`` runs ``--rounds`` rounds on the quick start's digits, every scenario with ShapFed-WA on its
own data or, where it names none, on the digits. A run is told by three hashes: the final weights, the metrics' values
and ``contributions.csv``. About 3 minutes on one core, with the data of all scenarios below ``$FLSV_DATA_ROOT``; the
numbers are those of one machine: another processor rounds otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

CONFIGS = Path(__file__).parents[1] / "configs"
#: Those that fit cannot run, or not on digits in seconds.
LEFT_OUT = {"value", "cifar10_resnet34", "quickstart"}


def digest(value: Any) -> str:
    """Of nested tensors, numbers and texts."""
    sha = hashlib.sha256()

    def feed(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            sha.update(str((part.dtype, tuple(part.shape))).encode())
            sha.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key in sorted(part):
                sha.update(str(key).encode())
                feed(part[key])
        else:
            sha.update(str(part).encode())

    feed(value)
    return sha.hexdigest()[:16]


def compositions() -> dict[str, list[Path]]:
    """Name of a run to its files."""
    quick = CONFIGS / "quickstart.yaml"
    found = {"quickstart": [quick]}
    for path in sorted(CONFIGS.glob("*.yaml")):
        if path.stem not in LEFT_OUT:
            whole = "source:" in path.read_text()
            found[path.stem] = [path] if whole else [quick, path]
    for path in sorted((CONFIGS / "scenarios").glob("*.yaml")):
        found[f"scenarios/{path.stem}"] = [quick, path]
    return found


def run(files: list[Path], rounds: int, extra: list[str], folder: str) -> dict[str, str]:
    """One fit."""
    try:
        from flsv.cli.parser import make_cli
    except ImportError:
        from flsv.cli import make_cli  # before 0.2
    options = [option for file in files for option in ("--config", str(file))]
    options += ["--trainer.max_epochs", str(rounds), "--trainer.default_root_dir", folder]
    options += ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
    options += ["--trainer.limit_train_batches", "4", "--trainer.limit_val_batches", "2"]
    options += ["--federation.reporting.table", "false", "--federation.reporting.figures", "0", *extra]
    cli = make_cli(options, run=False)
    cli.trainer.fit(cli.model, cli.datamodule)
    loop = next(each for each in cli.trainer.callbacks if type(each).__name__ == "FederatedLoop")
    written = sorted(Path(folder).rglob("contributions.csv"))
    return {
        "weights": digest(cli.model.state_dict()),
        "contributions": digest(loop.contributions),
        "csv": hashlib.sha256(written[-1].read_bytes()).hexdigest()[:16] if written else "",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="names of runs")
    parser.add_argument("--out", type=Path, help="write the hashes here")
    parser.add_argument("--against", type=Path, help="compare with these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sys.argv = sys.argv[:1]
    root = os.environ.get("FLSV_DATA_ROOT")
    found: dict[str, Any] = {}
    for name, files in compositions().items():
        if options.only and name not in options.only:
            continue
        extra = ["--data.files.root", root] if root is not None else []
        try:
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as said:
                found[name] = run(files, options.rounds, extra, folder)
        except (Exception, SystemExit) as error:
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:200]}{said.getvalue()[-200:]}"}
        print(name, *found[name].values(), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.against is None:
        return 0
    before = json.loads(options.against.read_text())
    different = [name for name in found if found[name] != before.get(name)]
    for name in different:
        parts = [part for part in found[name] if found[name][part] != before.get(name, {}).get(part)]
        print(f"differs: {name}: {', '.join(parts)}")
    print(f"{len(found) - len(different)} of {len(found)} are the same.")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
