"""Functions that rebuild the trainer, module and data of a run from its folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from flsv.cli.command import NO_BARS
from flsv.cli.parser import FederatedCLI, make_cli
from flsv.results.folder import find_config_of

#: Sections of a saved configuration that define a federation.
SAVED_SECTIONS = (
    "seed_everything",
    "trainer",
    "model",
    "optimizer",
    "lr_scheduler",
    "data",
    "federation",
    "strict",
)
#: Arguments by which a fit prints nothing, saves nothing and draws no figures.
SILENT_ARGUMENTS = (
    *NO_BARS,
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.num_sanity_val_steps=0",
    "--federation.reporting.figures=0",
    "--federation.reporting.table=false",
    "--federation.evaluation.every=0",
)


@contextmanager
def saved_run(run: Path, arguments: Sequence[str] = ()) -> Iterator[tuple[list[str], int]]:
    """Yield the arguments that rebuild a run, valid within this context, and the run's seed."""
    config = yaml.safe_load(find_config_of(run).read_text())
    seed = int(config.get("seed_everything") or 0)
    with config_with_seeds(config, seed) as config_arguments:
        _option, config_file = config_arguments  # --config FILE
        root_argument = f"--trainer.default_root_dir={Path(config_file).parent}"
        all_arguments = [*config_arguments, *arguments, *SILENT_ARGUMENTS, root_argument]
        yield all_arguments, seed


def make_run(arguments: Sequence[str], seed: int) -> FederatedCLI:
    """Build the trainer, module and data from the arguments that :func:`saved_run` yields."""
    return make_cli([*arguments, f"--seed_everything={seed}"], run=False, quiet=True)


@contextmanager
def config_with_seeds(config: Mapping[str, Any], seed: int) -> Iterator[list[str]]:
    """Yield arguments of ``flsv fit`` that set all unset seeds of data and federation to ``seed``.

    The clients' samples then do not depend on ``--seed_everything``.
    """
    with TemporaryDirectory(prefix="flsv-") as folder:
        sections = {name: config[name] for name in SAVED_SECTIONS if name in config}
        for name in ("data", "federation"):
            if name in sections:
                sections[name] = _with_seed(sections[name], seed)
        file = Path(folder, "federation.yaml")
        file.write_text(yaml.safe_dump(sections))
        yield ["--config", str(file)]


def _with_seed(config: Any, seed: int) -> Any:
    """Replace every ``seed`` of a configuration that is None."""
    if isinstance(config, list):
        return [_with_seed(item, seed) for item in config]
    if not isinstance(config, Mapping):
        return config
    options = {}
    for name, value in config.items():
        is_missing_seed = name == "seed" and value is None
        if is_missing_seed:
            options[name] = seed
        else:
            options[name] = _with_seed(value, seed)
    return options
