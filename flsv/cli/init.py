"""flsv init copies a packaged configuration, or a template of a project on Flower
or NVIDIA FLARE, into a folder.

    flsv init --config quickstart         quickstart.yaml, here
    flsv init mine --config fedavg --config scenarios/guo_noisy
    flsv init --flower my_federation      a project that `flwr run` starts
    flsv init --nvflare my_federation     a job for `nvflare job submit`

A copy in the working folder is used from then on instead of the packaged
configuration. If a file exists already, the command fails and copies nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from flsv.cli.command import command_parser
from flsv.cli.configs import find_config
from flsv.utilities.atomic_files import check_writable
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.wings import PACKAGE, brought

#: Projects that wings bring, by the option that writes one.
_PROJECTS = brought("projects")


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv init`` with the command-line arguments ``args``."""
    parser = command_parser("flsv init", __doc__)
    project_options = parser.add_mutually_exclusive_group()
    for name, project in _PROJECTS.items():
        project_options.add_argument(f"--{name}", metavar="DIR", type=Path, help=project["help"])
    options = parser.parse_args(args)

    folder = options.folder or Path()
    project_name = None
    for name in _PROJECTS:
        project_folder = getattr(options, name)
        if project_folder is not None:
            project_name = name
            folder = project_folder
    check_writable(folder)
    if project_name is not None:
        message = _copy_project(project_name, folder)
    else:
        message = _copy_configs(options.config or ["quickstart"], folder)
    if not quiet:
        print(message)


def _copy_configs(names: Sequence[str], folder: Path) -> str:
    copies = {folder / path.name: path for path in map(find_config, names)}
    existing_files = [str(copy) for copy in copies if copy.exists()]
    if existing_files:
        raise ConfigurationError(
            f"{', '.join(existing_files)} is there already. Name another folder, or use the file that exists."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for copy, path in copies.items():
        shutil.copyfile(path, copy)
    options = " ".join(f"--config {copy}" for copy in copies)
    return f"Written: {', '.join(map(str, copies))}. To run it: flsv fit {options}"


def _copy_project(name: str, folder: Path) -> str:
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"{folder} is not empty. Name a new folder.")
    project = _PROJECTS[name]
    shutil.copytree(
        PACKAGE / project["folder"],
        folder,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(PACKAGE / project["shared_file"], folder)
    return (
        f"{folder}/README.md explains how to run it. Put your own module and data into "
        f"{folder}/{project['own_code']}."
    )
