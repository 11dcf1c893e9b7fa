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

_TEMPLATES = Path(__file__).parents[1] / "sites" / "templates"
#: Limits of a site, which are the same on each network.
_POLICY = "flsv-site.toml"
#: The file for the user's own module and data, by the template's network.
_OWN_CODE = {
    "flower": "fedapp/federation.py",
    "nvflare": "job/app/custom/federation.py",
}


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv init`` with the command-line arguments ``args``."""
    parser = command_parser("flsv init", __doc__)
    options = parser.parse_args(args)
    if options.flower and options.nvflare:
        parser.error("--nvflare is not allowed with argument --flower")
    network_folder = options.flower or options.nvflare
    check_writable(network_folder or options.folder or Path())
    if options.flower is not None:
        message = _copy_template("flower", options.flower)
    elif options.nvflare is not None:
        message = _copy_template("nvflare", options.nvflare)
    else:
        message = _copy_configs(options.config or ["quickstart"], options.folder or Path())
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


def _copy_template(network: str, folder: Path) -> str:
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"{folder} is not empty. Name a new folder.")
    shutil.copytree(
        _TEMPLATES / network,
        folder,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(_TEMPLATES / _POLICY, folder)
    return (
        f"{folder}/README.md explains how to run it. Put your own module and data into "
        f"{folder}/{_OWN_CODE[network]}."
    )
