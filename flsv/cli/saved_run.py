"""Functions that build the trainer, module and data of a run of ``flsv fit`` again, from the run's folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from flsv.cli.command import NO_BARS
from flsv.cli.parser import FederatedCLI, make_cli
from flsv.configuration.identity import Identity, config_settings
from flsv.federation import FederatedLoop
from flsv.games.performance import Judges
from flsv.results.folder import CONFIG, RECORD, find_config_of
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.own_files import own_folder

#: Sections of a saved configuration that define a federation.
SECTIONS = ("seed_everything", "trainer", "model", "data", "federation")
#: Arguments by which a fit prints nothing, saves nothing and draws no figures.
QUIET = (
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
    """Yield the arguments that build a run's parts again, valid within this context, and the run's seed."""
    config = yaml.safe_load(find_config_of(run).read_text())
    first = int(config.get("seed_everything") or 0)
    with dealt_once(config, first, run) as file:
        yield [*file, *arguments, *QUIET, f"--trainer.default_root_dir={Path(file[1]).parent}"], first


def make_run(arguments: Sequence[str], seed: int) -> FederatedCLI:
    """Build the trainer, module and data from the arguments that :func:`saved_run` yields, with the seed ``seed``."""
    return make_cli([*arguments, f"--seed_everything={seed}"], run=False, quiet=True)


@contextmanager
def dealt_once(config: Mapping[str, Any], seed: int, root: Path) -> Iterator[list[str]]:
    """Yield arguments of a fit whose partition does not follow ``--seed_everything``: its open seeds are ``seed``."""
    with own_folder(root) as folder:
        kept = {name: config[name] for name in SECTIONS if name in config}
        kept |= {name: _with_seed(kept[name], seed) for name in ("data", "federation") if name in kept}
        file = folder / "federation.yaml"
        file.write_text(yaml.safe_dump(kept))
        yield ["--config", str(file)]


def _with_seed(config: Any, seed: int) -> Any:
    """Return a configuration in which every seed that is None is replaced by ``seed``."""
    if isinstance(config, Mapping):
        return {k: seed if k == "seed" and held is None else _with_seed(held, seed) for k, held in config.items()}
    return [_with_seed(each, seed) for each in config] if isinstance(config, list) else config


def check_data(run: Path, record: Mapping[str, Any], identity: Identity, names: Sequence[str]) -> None:
    """Check that the clients and their samples are the same as in the run."""
    before = record["clients"]
    if [*names] != before:
        found = [f"its clients are {', '.join(before)}, and these are {', '.join(names)}"]
    else:
        found = identity.differences(Identity(identity.settings, record["hashes"]))
    if found:
        raise ConfigurationError(
            f"the data are not those of {run}, as its {RECORD} tells: {'; '.join(found)}. Give it the data that it was "
            "run on."
        )


def changed_settings(run: Path, identity: Identity) -> list[str]:
    """Return a text for each setting of ``identity``, except the number of rounds, that differs from the run's."""
    before = Identity(config_settings(yaml.safe_load((run / CONFIG).read_text())), {})
    silent = {"trainer.max_epochs", *(argument.partition("=")[0].lstrip("-") for argument in QUIET)}
    return [text for text in identity.other_settings(before, "{} instead of {}") if text.split()[0] not in silent]


def performance_by(loop: FederatedLoop) -> tuple[str, str | None]:
    """Return ``(performance, mode)`` as the arguments of a run's metrics; accuracy if none has a performance."""
    found = {name: metric.performance for name, metric in loop.metrics.items() if hasattr(metric, "performance")}
    named: dict[tuple[Any, str | None], None] = {}
    for by in (found | loop.contribution_metrics.performances).values():
        name = by if isinstance(by, str) else by.called
        if name == "per_class_accuracy":
            named["balanced_accuracy", None] = None
        elif name:
            named[name, None] = None
        else:
            named[by.of, by.mode] = None
    if len(named) > 1 or not all(isinstance(of, str) for of, _ in named):
        raise ConfigurationError(
            f"the run's metrics value by {', '.join(str(of) for of, _ in named)}: choose one with --metric."
        )
    return next(iter(named), ("accuracy", None))


def judges_of(loop: FederatedLoop) -> Judges:
    """Return who scored coalitions' models in a run: ``"clients"`` if the clients did so for all metrics, else
    ``"server"``."""
    found = {getattr(loop.metrics[name], "judges", "server") for name in loop.contribution_metrics.performances}
    return "clients" if found == {"clients"} else "server"
