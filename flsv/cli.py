"""Federated learning in which every participant's contribution is measured.

LightningCLI, with a ``federation`` section (the server) beside ``trainer``, ``model`` and ``data``. Besides the
subcommands below there are ``flsv compare``, several algorithms on one partition, and ``flsv value``, valuation before
training (``flsv compare --help``, ``flsv value --help``).
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from flsv import ConfigurationError, FederatedDataModule, FederatedLoop, __version__


class FederatedCLI(LightningCLI):
    """The command line. ``federation`` holds the arguments of :class:`flsv.FederatedLoop`.

    The numbers of clients and classes are said once, by the data: metrics and the model take them from there.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(FederatedLoop, "federation")
        parser.set_defaults({"model": {"class_path": "flsv.ClassifierClient", "init_args": {"network": "mlp"}}})

    def before_fit(self) -> None:
        """``--ckpt_path last`` is the newest checkpoint of any run below ``default_root_dir``."""
        config = self.config_init[self.subcommand]
        if config.ckpt_path == "last":
            root = Path(self.trainer.default_root_dir)
            checkpoints = sorted(root.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)
            if not checkpoints:
                raise ConfigurationError(
                    f"--ckpt_path last: no checkpoint below {root.resolve()}. Name one, or leave ckpt_path out."
                )
            config.ckpt_path = str(checkpoints[-1])
            print(f"Resuming from {config.ckpt_path}")


def main(args: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: the arguments; by default those of the process.

    Returns:
        The exit status: 0, or 2 for a configuration that cannot work.
    """
    # A console script does not look for modules in the working folder, `python -m flsv` does: class paths of the
    # user's own modules shall work in both.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    _quieten()
    given = sys.argv[1:] if args is None else args
    try:
        if given[:1] == ["compare"]:
            from flsv.compare import main as compare

            compare(given[1:])
        elif given[:1] == ["value"]:
            from flsv.value import main as value

            value(given[1:])
        else:
            make_cli(args)
    except ValueError as error:
        # An error of a nested object's arguments arrives wrapped in the parser's own.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigurationError):
            cause = cause.__cause__
        if cause is None:
            raise
        print(f"flsv: error: {cause}", file=sys.stderr)
        return 2
    return 0


def make_cli(args: list[str] | None = None, run: bool = True) -> FederatedCLI:
    """Parse a command line, build what it names and, with ``run``, do what its subcommand says.

    Args:
        args: the arguments, by default those of the process; without ``run`` there is no subcommand among them.
    """
    return FederatedCLI(
        L.LightningModule,
        FederatedDataModule,
        run=run,
        subclass_mode_model=True,
        auto_configure_optimizers=False,
        seed_everything_default=0,
        trainer_defaults={"default_root_dir": "runs", "max_epochs": 10, "log_every_n_steps": 1},
        parser_kwargs={"prog": "flsv", "version": __version__, "description": __doc__},
        save_config_kwargs={"overwrite": True},
        args=args,
    )


def _quieten() -> None:
    """Leave out what Lightning says to everybody and nobody can act on."""
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\)")  # Lightning's use of torch
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in record.getMessage()
    )
