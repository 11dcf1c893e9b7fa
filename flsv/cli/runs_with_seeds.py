"""Runs of one configuration with several seeds, each in a folder of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pandas import DataFrame

from flsv.cli.checkpoints import modified
from flsv.cli.command import QUIET_FIT_ARGUMENTS
from flsv.cli.config_texts import write_config
from flsv.cli.parser import make_cli
from flsv.configuration.identity import Identity
from flsv.configuration.option_texts import SECTIONS
from flsv.metrics.coalitions.design import arguments_of_design
from flsv.results import Run, open_run
from flsv.results.basis import seed_summary
from flsv.results.folder import RUNS, RUNS_SETTINGS, run_folder
from flsv.results.reading import SUMMARY_FILE
from flsv.utilities.atomic_files import write_json
from flsv.utilities.csv_files import read_rows, save_csv, save_table
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.formats import VERSION_PREFIX, stored_package_versions, warn_of_versions
from flsv.utilities.stop_signals import error_of_stop

#: Sections of a saved configuration that define a federation.
SAVED_SECTIONS = ("seed_everything", *SECTIONS)
#: Columns of the list of finished runs: a run's name, and its folder.
RUN_LIST_COLUMNS = ("run", "folder")
#: Pattern of the names of checkpoints from which a stopped run goes on.
LAST_CHECKPOINTS = "last*.ckpt"


def runs_with_seeds(
    config: Mapping[str, Any],
    identity: Identity,
    seeds: Sequence[int],
    out: Path,
    *,
    shows_bars: bool = False,
    say: Callable[[str], None],
) -> list[Run]:
    """Fit a configuration with each seed below ``out``, and return the runs. Those that are there are read, and one
    that was stopped goes on.
    """
    has_settings = (out / RUNS_SETTINGS).is_file()
    folder_by_name = _finished_runs(out, identity.flat())  # each below `out`
    num_finished = len(folder_by_name)
    if num_finished > len(seeds):
        say(f"{out} has {num_finished} runs. The means are over all of them.")
        seeds = range(seeds[0], seeds[0] + num_finished)
    runs: list[Run] = []
    for seed in seeds:
        name = f"seed_{seed}"
        if name in folder_by_name:
            run = open_run(out / folder_by_name[name])
        else:
            say(f"Run {len(runs) + 1} of {len(seeds)}: seed {seed}")
            config_of_seed = _with_design_of(runs[0], config) if runs else config
            with config_with_seeds(config_of_seed, seeds[0]) as arguments:
                # Only a list tells of which settings a stopped run in the folder is.
                run = _fit_with_seed(arguments, seed, out / name, shows_bars, resumes=has_settings)
            folder_by_name[name] = os.path.relpath(run.folder, out)
            save_csv(out / RUNS, [RUN_LIST_COLUMNS, *folder_by_name.items()])

        runs.append(run)
        _check_same_samples(run, runs[0])
    return runs


def _with_design_of(first_run: Run, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration whose metrics name the coalitions that those of the first run have chosen, so that the
    values of all seeds are comparable.
    """
    config = deepcopy(dict(config))
    metrics = config["federation"]["metrics"] or {}
    for name, metric in metrics.items():
        arguments = metric.get("init_args", {})
        if arguments.get("coalitions") == "auto":
            arguments |= arguments_of_design(first_run.performances.get(name, {}))
    return config


def _check_same_samples(run: Run, first_run: Run) -> None:
    if run.record["hashes"] != first_run.record["hashes"]:
        raise ConfigurationError(
            "the clients do not have the same samples in all runs, so that their values cannot be averaged. A "
            "source that draws samples needs a seed of its own."
        )


def saved_summary(out: Path) -> tuple[DataFrame, Path]:
    """Save the clients' mean values over the runs below ``out``. Return the table, and its file."""
    summary = seed_summary(open_run(out))
    path = out / SUMMARY_FILE
    save_table(path, summary)
    return summary, path


def _finished_runs(out: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the folder below ``out`` of each finished run. Runs of other settings are refused, unless all have failed
    before their first checkpoint.
    """
    path = out / RUNS_SETTINGS
    has_checkpoints = any(out.rglob(LAST_CHECKPOINTS))
    has_begun = path.is_file() and (has_checkpoints or listed_folders(out))
    if not has_begun:
        out.mkdir(parents=True, exist_ok=True)
        save_csv(out / RUNS, [RUN_LIST_COLUMNS])
        write_json(path, settings)
        return {}

    stored_settings = json.loads(path.read_text())
    all_differences = Identity(settings, {}).other_settings(Identity(stored_settings, {}))
    differences = [text for text in all_differences if not text.startswith(VERSION_PREFIX)]
    if differences:
        raise ConfigurationError(
            f"{out} has runs with other settings: {listed(differences)}. Continue these runs with their settings, move "
            "the folder away, or choose another folder."
        )
    warn_of_versions(str(out), stored_package_versions(stored_settings))
    return listed_folders(out)


def listed_folders(out: Path) -> dict[str, str]:
    """Return the folder below ``out`` of each finished run, by the run's name."""
    rows = read_rows(out / RUNS, {"run": str, "folder": str})
    return {row["run"]: row["folder"] for row in rows}


def _fit_with_seed(
    arguments: Sequence[str],
    seed: int,
    folder: Path,
    shows_bars: bool,
    resumes: bool,
) -> Run:
    options = [
        f"--trainer.default_root_dir={folder}",
        f"--seed_everything={seed}",
        f"--federation.seed={seed}",
        *QUIET_FIT_ARGUMENTS,
        f"--trainer.enable_progress_bar={str(shows_bars).lower()}",
    ]
    checkpoint = max(folder.rglob(LAST_CHECKPOINTS), key=modified, default=None)
    if resumes and checkpoint is not None:
        options.append(f"--ckpt_path={checkpoint}")
    cli = make_cli(["fit", *arguments, *options], quiet=True, starts_anew=True)
    run = open_run(run_folder(cli.trainer))
    _check_complete(run, folder)
    return run


def _check_complete(run: Run, folder: Path) -> None:
    """Raise an error if a run was stopped before its last round, or before its coalitions were trained."""
    if not run.ended:
        raise ConfigurationError(
            f"the run in {folder} was stopped before its last round. Run the same command again."
        )
    for performance in run.performances.values():
        if performance.get("interrupted"):
            raise error_of_stop()  # the fit has ended as usual, without its coalitions
        if performance.get("unfinished"):
            raise ConfigurationError(
                f"the run in {folder} has no values. {performance['why_no_values']} Run the same command again."
            )


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
        file.write_text(write_config(sections), encoding="utf-8")
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
