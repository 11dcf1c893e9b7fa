"""What every shipped configuration computes: to see that a change changes nothing.

    FLSV_DATA_ROOT=... python tools/config_hashes.py                    # against the figures of 1.0.0rc1
    FLSV_DATA_ROOT=... python tools/config_hashes.py --out FILE         # write figures
    FLSV_DATA_ROOT=... python tools/config_hashes.py --against FILE --only shapfed natural/clinics

Every file of ``configs/`` trains ``--rounds`` rounds of a few batches on the CPU. Its figures are a hash and two
norms of the final weights, of each metric's values and of the models that clients received last. Equal hashes are
bitwise identical. Another processor rounds otherwise, and there norms may differ by ``--tolerance``. Two and a half
minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import logging
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import torch

CONFIGS = Path(__file__).parents[1] / "configs"
FIGURES = Path(__file__).with_suffix(".json")
#: Nothing said, drawn or kept; a few batches; on the CPU.
OPTIONS = (
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.limit_train_batches=4",
    "--trainer.limit_val_batches=2",
    "--trainer.accelerator=cpu",
    "--trainer.precision=32-true",
    "--federation.reporting.table=false",
    "--federation.reporting.figures=0",
)
#: What comes before a file of ``configs/tables``.
BEFORE_TABLES = {
    "pfedsv": ["scenarios/pfedsv_dirichlet"],
    "pfedsv_full": ["scenarios/pfedsv_pathological", "tables/pfedsv"],
    "pfedsv_hundred": ["scenarios/pfedsv_dirichlet", "tables/pfedsv"],
    "privacy": [],
    "shapleyfl": ["scenarios/shapleyfl_long_tail"],
    "shapleyfl_cifar10": ["scenarios/shapleyfl_shards", "tables/shapleyfl"],
    "shapleyfl_clinics": ["scenarios/shapfed_ham10000", "tables/shapleyfl"],
    "shapleyfl_full": ["scenarios/shapleyfl_shards", "tables/shapleyfl"],
}


def compositions() -> dict[str, list[Path]]:
    """Name of a run to its files."""
    base = [
        CONFIGS / "digits.yaml",
        CONFIGS / "shapfed_wa.yaml",
    ]  # which was the quick start of 1.0.0rc1
    found = {}
    for path in sorted(CONFIGS.rglob("*.yaml")):
        folder, name = path.parent.name, str(path.relative_to(CONFIGS).with_suffix(""))
        if folder == "tables":
            found[name] = [*(CONFIGS / f"{each}.yaml" for each in BEFORE_TABLES[path.stem]), path]
        elif folder != "scenarios" and "source:" in path.read_text():
            found[name] = base if name == "quickstart" else [path]
        else:
            found[name] = [*base, path]
    return found


def figures(value: Any, name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Of nested tensors: for each its name, a hash of its bytes, and the sums of its absolute values and squares."""
    if isinstance(value, torch.Tensor):
        one = value.detach().cpu().contiguous()
        sha = hashlib.sha256(str((one.dtype, tuple(one.shape))).encode())
        sha.update(one.view(-1).view(torch.uint8).numpy().tobytes())
        numbers = one.double().nan_to_num(posinf=0.0, neginf=0.0)
        yield (
            name,
            [sha.hexdigest()[:16], float(numbers.abs().sum()), float(numbers.square().sum())],
        )
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from figures(value[key], f"{name}/{key}" if name else str(key))


def together(tensors: dict[Any, torch.Tensor]) -> torch.Tensor:
    """All of them as one vector."""
    parts = [tensors[key].detach().cpu().double().flatten() for key in sorted(tensors, key=str)]
    return torch.cat(parts) if parts else torch.zeros(0)


def language_model(folder: str) -> str:
    """A folder with a tiny model of random weights, in the place of the one that an example trains in minutes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 256, "n_positions": 64}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **still)).save_pretrained(
        f"{folder}/network"
    )
    return f"{folder}/network"


def fit(name: str, files: list[Path], rounds: int, root: str, folder: str) -> dict[str, list[Any]]:
    """The figures of one training."""
    from flsv._lightning.patches import find_loop
    from flsv.cli.parser import make_cli

    options = []
    for file in files:
        options += ["--config", str(file)]
    options += OPTIONS
    options.append(f"--trainer.max_epochs={rounds}")
    options.append(f"--trainer.default_root_dir={folder}")
    options.append(f"--data.files.root={root}")
    if name == "natural/tales_lora":
        options.append(f"--model.init_args.network={language_model(folder)}")
    if name == "cifar10_resnet34":
        options += ["--trainer.limit_train_batches=1", "--data.splits.max_samples=4000"]

    cli = make_cli(options, run=False)
    cli.trainer.fit(cli.model, cli.datamodule)
    loop = find_loop(cli.trainer.callbacks)
    results = {
        "weights": together(cli.model.state_dict()),
        "received": together(loop.received()),
        "values": {metric_name: metric.compute() for metric_name, metric in loop.metrics.items()},
    }
    return dict(figures(results))


def value(files: list[Path], folder: str) -> dict[str, list[Any]]:
    """The figures of the tables that ``flsv value`` writes."""
    from flsv.cli import main

    options = [option for file in files for option in ("--config", str(file))]
    main(["value", "--quiet", *options, "--out", folder])
    tables = {
        path.name: pandas.read_csv(path).select_dtypes("number")
        for path in Path(folder).rglob("*.csv")
    }
    return dict(
        figures({name: torch.tensor(table.to_numpy(float)) for name, table in tables.items()})
    )


def difference(found: dict[str, Any], before: dict[str, Any]) -> float:
    """The largest relative difference of norms; 0 where all hashes are equal, infinity where parts are missing."""
    if found.keys() != before.keys():
        return float("inf")
    norms = [0.0]
    for part, (sha, *numbers) in found.items():
        if sha != before[part][0]:
            pairs = zip(numbers, before[part][1:])
            norms += [max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs), 1e-16]
    return max(norms)


def report(found: dict[str, Any], before: dict[str, Any], tolerance: float) -> int:
    """Print what differs; the exit status."""
    without = sorted(found.keys() - before.keys())
    off = {name: difference(found[name], before[name]) for name in found if name in before}
    for name, much in off.items():
        if much > 0:
            parts = [part for part in found[name] if found[name][part] != before[name].get(part)]
            print(
                f"{'differs' if much > tolerance else 'near'}: {name}: by {much:.1g}: {', '.join(parts)}"
            )
    bits, near = (
        sum(each == 0 for each in off.values()),
        sum(0 < each <= tolerance for each in off.values()),
    )
    print(
        f"{len(off)} configurations: {bits} the same to the bit, {near} within {tolerance:g}, ",
        end="",
    )
    print(f"{len(off) - bits - near} differ. Without figures: {', '.join(without) or 'none'}.")
    return int(bits + near < len(off))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="names of runs")
    parser.add_argument("--out", type=Path, help="write the figures here, and compare with none")
    parser.add_argument("--against", type=Path, default=FIGURES, help="compare with these")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="relative; 1e-5 on another processor"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sys.argv = sys.argv[:1]
    if "FLSV_DATA_ROOT" not in os.environ:
        parser.error(
            "set FLSV_DATA_ROOT to the folder of the real data: half of the configurations read them"
        )
    root = os.environ["FLSV_DATA_ROOT"]
    found: dict[str, Any] = {}
    for name, files in compositions().items():
        if options.only and name not in options.only:
            continue
        try:
            said = io.StringIO()
            quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said)
            with tempfile.TemporaryDirectory() as folder, quiet[0], quiet[1]:
                one = (
                    value(files, folder)
                    if name == "value"
                    else fit(name, files, options.rounds, root, folder)
                )
            found[name] = one
        except (Exception, SystemExit) as error:
            found[name] = {
                f"{type(error).__name__}: {str(error)[:200]}{said.getvalue()[-200:]}": [
                    "",
                    0.0,
                    0.0,
                ]
            }
        print(name, *(f"{part} {sha}" for part, (sha, *_) in found[name].items()), flush=True)
    if options.out is None:
        return report(found, json.loads(options.against.read_text())["figures"], options.tolerance)
    machine = {
        "processor": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(parts)}" for name, parts in found.items()
    )
    options.out.write_text(f'{{"machine": {json.dumps(machine)},\n "figures": {{\n{lines}\n}}}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
