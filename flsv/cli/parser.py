"""The LightningCLI of ``flsv fit``, ``validate``, ``test`` and ``predict``, with a section ``federation``."""

from __future__ import annotations

import os
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import lightning as L
import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed import is_torchelastic_launched

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop
from flsv.__about__ import code_version
from flsv._lightning.patches import callbacks_of, find_loop
from flsv.aggregation import Aggregator
from flsv.cli.checkpoints import (
    WritePredictions,
    checkpoint_folders,
    default_checkpoints,
    find_checkpoint,
)
from flsv.cli.config_errors import OptionError
from flsv.cli.configs import packaged_names
from flsv.cli.links import link_required
from flsv.cli.options import (
    CONFIG_HELP,
    PARSER_OPTIONS,
    USAGE,
    ConfigFile,
    FitParser,
    import_parts,
    subparsers_of,
    with_merged_options,
)
from flsv.configuration.identity import Identity, sample_hashes
from flsv.configuration.option_texts import config_settings
from flsv.engines.ranks import FederatedStrategy, started_by_script
from flsv.filters import UpdateFilter
from flsv.isolation.silent_logger import SilentLogger
from flsv.metrics import ContributionMetric
from flsv.personalization import Personalizer
from flsv.results.folder import (
    CONFIG,
    CONTRIBUTIONS,
    RECORD,
    leaves_files,
    run_folder,
    runs_folder,
    where_results_are,
)
from flsv.sampling import ClientSampler
from flsv.training.algorithms import ClientAlgorithm
from flsv.uploads.base import Upload
from flsv.utilities.atomic_files import (
    check_writable,
    set_aside,
    whole_lines,
)
from flsv.utilities.errors import ConfigurationError, nearest
from flsv.utilities.plugins import installed
from flsv.utilities.seeding import kept_global_seed
from flsv.utilities.stop_signals import stopping_between_batches

#: ``{group of entry points: base class}`` of the classes that other packages may register.
PARTS: dict[str, type] = {
    "flsv.aggregation": Aggregator,
    "flsv.client_algorithms": ClientAlgorithm,
    "flsv.filters": UpdateFilter,
    "flsv.metrics": ContributionMetric,
    "flsv.personalization": Personalizer,
    "flsv.sampling": ClientSampler,
    "flsv.uploads": Upload,
}
#: The file with the beginning of the help of ``flsv fit``.
FIT_HELP = Path(__file__).with_name("templates") / "fit_help.txt"
#: Seconds that a stopped rank waits so that the script that started it can print its last messages.
SECONDS_UNTIL_KILLED = 10.0


@contextmanager
def _explained_optimizer_errors() -> Iterator[None]:
    """Raise ConfigurationError in place of a ValueError of torch's optimizers within this context."""
    try:
        yield
    except ValueError as error:
        *_, (innermost_frame, _line) = traceback.walk_tb(error.__traceback__)
        module_name = innermost_frame.f_globals["__name__"]
        if not module_name.startswith("torch.optim"):
            raise
        raise ConfigurationError(
            f"optimizer or lr_scheduler: {error}. Give a value that its documentation allows."
        ) from error


class SavedConfig(SaveConfigCallback):
    """Callback that saves ``config.yaml`` into the folder of a fit, with any logger."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Do nothing: other commands save no configuration, and a fit saves it after its record."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and leaves_files(trainer):
            self.save_config(trainer, pl_module, "fit")
        self.already_saved = True

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the configuration of a fit without rounds left, which begins no training."""
        if not self.already_saved:
            self.on_train_start(trainer, pl_module)

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        folder = run_folder(trainer)
        path = folder / self.config_filename
        folder.mkdir(parents=True, exist_ok=True)
        self.parser.save(self.config, path, skip_none=False, overwrite=True)


def check_unused(folder: Path, checkpoint: str | None) -> None:
    """Raise ConfigurationError if a fit would overwrite another run's files, or a file of the user.

    A fit that resumes from a checkpoint in the folder is the same run.
    """
    if checkpoint is not None and folder.resolve() in Path(checkpoint).resolve().parents:
        return
    advice = (
        "Give this run a folder of its own (--trainer.default_root_dir, or the logger's version), "
        "or move the earlier files away"
    )
    table = folder / CONTRIBUTIONS
    if table.is_file() and len(whole_lines(table)) > 1:
        raise ConfigurationError(
            f"{folder} holds a run already. {advice}. --ckpt_path last resumes that run."
        )
    config = folder / CONFIG
    is_users_own = config.is_file() and not (folder / RECORD).is_file()
    if is_users_own:
        raise ConfigurationError(
            f"{config} was not written by a run, and this run would replace it by its own configuration. {advice}."
        )


class FederatedCLI(LightningCLI):
    """LightningCLI with a section ``federation``.

    With ``quiet`` it does not print where results are. With ``starts_anew`` a stopped run in the folder of a fit may be
    replaced.
    """

    def __init__(
        self, *arguments: Any, quiet: bool = False, starts_anew: bool = False, **options: Any
    ) -> None:
        self.quiet = quiet
        self.starts_anew = starts_anew
        words = options.get("args")
        if words is None:
            words = sys.argv[1:]
        if isinstance(words, list):
            words = with_merged_options(words)
            options["args"] = words
        self._command = next(iter(words), None)  # the words may be a dictionary or a Namespace
        self.prediction_writer: WritePredictions | None = None
        super().__init__(*arguments, **options)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # a static method in Lightning
        """Return only the subcommand that is used, because it takes long to build a parser."""
        subcommands = LightningCLI.subcommands()
        if self._command in subcommands:
            return {self._command: subcommands[self._command]}
        return subcommands

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = FitParser(
            **{"dump_header": [f"lightning.pytorch=={L.__version__}"], **PARSER_OPTIONS, **kwargs}
        )
        parser.add_argument("-c", "--config", action=ConfigFile, help=CONFIG_HELP)
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = USAGE
        if self._command == "fit":
            names = textwrap.fill(", ".join(packaged_names()), width=78)
            parser.description = FIT_HELP.read_text("utf-8") + names
        import_parts()
        for group, base in PARTS.items():
            installed(group, base)
        parser.add_lightning_class_args(FederatedLoop, "federation")
        ready_made = f"flsv.{ClassifierClient.__name__}"
        parser.set_defaults({"model": {"class_path": ready_made, "init_args": {"network": "mlp"}}})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the command line. The model's required arguments may come from the data instead."""
        try:
            super().parse_arguments(parser, args)
        except OptionError as error:
            parsers: list[Any] = [parser, *subparsers_of(parser)]
            section_parser = parsers[-1]  # the subcommand's, if there is one
            if not link_required(section_parser, str(error)):
                raise
            super().parse_arguments(parser, args)

    def instantiate_classes(self) -> None:
        with kept_global_seed(), _explained_optimizer_errors():
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Build the trainer. Unless configured callbacks save checkpoints, it saves ``last.ckpt`` and ``best.ckpt``."""
        config = self.config_init
        if self.subcommand is not None:
            config = config[self.subcommand]
        options = config.trainer
        if options.enable_checkpointing is not False and not options.barebones:
            kwargs.setdefault("callbacks", _with_default_checkpoints(options.callbacks))
        if self.subcommand is not None and options.strategy == "auto":
            kwargs.update(self._arguments_for_torchrun(options))

        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError, TypeError) as error:
            raise ConfigurationError(f"trainer: {error}") from error

        for logger in trainer.loggers:
            if isinstance(logger, SilentLogger):
                logger.redirect(trainer.default_root_dir)

        # mypy: set by Lightning's connectors
        if self.subcommand == "predict" and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.prediction_writer = WritePredictions()
            callbacks_of(trainer).append(self.prediction_writer)
        return trainer

    def _arguments_for_torchrun(self, options: Any) -> dict[str, Any]:
        """Return Trainer arguments that divide the clients among the processes of ``torchrun``, if it is used."""
        if not is_torchelastic_launched() or int(os.environ["WORLD_SIZE"]) == 1:
            return {}
        if self.subcommand != "fit":
            raise ConfigurationError(
                f"flsv {self.subcommand} would do the same work in every process of torchrun. Start "
                "it without torchrun."
            )
        arguments: dict[str, Any] = {"strategy": FederatedStrategy.strategy_name}
        processes_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        if options.devices == "auto":
            arguments["devices"] = processes_per_node
        if options.num_nodes == 1:
            arguments["num_nodes"] = int(os.environ["WORLD_SIZE"]) // processes_per_node
        return arguments

    @property
    def loop(self) -> FederatedLoop:
        """Return the loop among the trainer's callbacks."""
        return cast(FederatedLoop, find_loop(callbacks_of(self.trainer)))

    def identity(self) -> Identity:
        """Set up the data, and return the experiment's identity (settings and hashes of samples)."""
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        config = yaml.safe_load(self.parser.dump(self.config))
        return Identity(config_settings(config), sample_hashes(self.datamodule))

    def _run_subcommand(self, subcommand: str) -> None:
        is_fit = subcommand == "fit"
        stop_between_batches = stopping_between_batches() if is_fit else nullcontext()
        try:
            with stop_between_batches, _explained_optimizer_errors():
                super()._run_subcommand(subcommand)
        except (KeyboardInterrupt, SystemExit, OSError) as error:
            # On Ctrl-C, Lightning raises SystemExit. TensorBoard's writer raises OSError if it is closed twice.
            interrupt = error if isinstance(error, KeyboardInterrupt) else error.__context__
            if not isinstance(interrupt, KeyboardInterrupt):
                raise
            if started_by_script():
                # The script that started this rank is killed as soon as a rank fails, so wait for its messages.
                time.sleep(SECONDS_UNTIL_KILLED)
            if is_fit and self.trainer.is_global_zero and not self.quiet:
                self._say_how_to_go_on()
            raise interrupt from None

    def _say_how_to_go_on(self) -> None:
        if not self.loop.reporting.table:
            self.print_where_results_are(max_lines=1)
        for folder in checkpoint_folders(self.trainer):
            if any(folder.glob("*.ckpt")):
                print("Go on:   the same command with --ckpt_path last", flush=True)
                break

    def print_where_results_are(self, max_lines: int | None = None) -> None:
        """Print where the results are, and further commands, or only the first lines."""
        if self.trainer.is_global_zero and leaves_files(self.trainer):
            print("\n".join(where_results_are(self.trainer)[:max_lines]), flush=True)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would replace the configured model by the one of the checkpoint."""

    def before_fit(self) -> None:
        """Find the checkpoint to start from, and check that the run's folder can be used."""
        config = self.config_init[self.subcommand]
        self._find_checkpoint(config)
        if self.subcommand == "fit":
            self._prepare_run_folder(config.ckpt_path)
        else:
            self._leave_no_run(config)

    def _find_checkpoint(self, config: Any) -> None:
        """Replace ``last`` and ``best`` by a path, and check that a path exists."""
        path = config.ckpt_path
        if path in ("last", "best"):
            checkpoint = find_checkpoint(path, self.trainer)
            config.ckpt_path = str(checkpoint)
            purpose = "Resuming" if self.subcommand == "fit" else "Weights"
            if not self.quiet:
                print(f"{purpose} from {checkpoint}")
        elif path is not None:
            _check_checkpoint(path)
        elif self.subcommand != "fit":
            warnings.warn(
                f"flsv {self.subcommand} without --ckpt_path uses the initial weights.",
                stacklevel=2,
            )

    def _prepare_run_folder(self, checkpoint: str | None) -> None:
        # mypy: set by Lightning's connectors
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        check_writable(runs_folder(self.trainer))
        if not self.trainer.is_global_zero:
            return
        folder = run_folder(self.trainer)
        if leaves_files(self.trainer) and not self.starts_anew:
            check_unused(folder, checkpoint)
        has_csv_logger = any(isinstance(logger, CSVLogger) for logger in self.trainer.loggers)
        logged_values = folder / ExperimentWriter.NAME_METRICS_FILE
        if has_csv_logger and logged_values.is_file():
            # The logger deletes the file, also of a run that goes on.
            new_path = set_aside(logged_values)
            warnings.warn(f"{logged_values} existed and was moved to {new_path}.", stacklevel=2)

    def _leave_no_run(self, config: Any) -> None:
        """Prevent commands other than ``fit`` from writing into a run, except predictions."""
        # Lightning warns that checkpoints are saved in another folder, but these commands save none.
        warnings.filterwarnings("ignore", message="The dirpath has changed")
        remaining_loggers = [
            logger
            for logger in self.trainer.loggers
            if not isinstance(logger, CSVLogger | TensorBoardLogger)
        ]
        self.trainer.loggers = remaining_loggers
        if self.prediction_writer is not None:
            folder = self._folder_of_predictions(config.ckpt_path)
            self.prediction_writer.folder = folder

    def _folder_of_predictions(self, checkpoint: str | None) -> Path:
        """Return the folder of the checkpoint's run, or else the trainer's. Older predictions in it are moved."""
        if checkpoint is not None:
            checkpoint_folder = Path(checkpoint).parent
            if checkpoint_folder.name == "checkpoints":
                return checkpoint_folder.parent
        folder = run_folder(self.trainer)
        for path in folder.glob("predictions.*"):
            new_path = set_aside(path)
            warnings.warn(f"{path} existed and was moved to {new_path}.", stacklevel=2)
        return folder

    before_validate = before_test = before_predict = before_fit

    def after_fit(self) -> None:
        """Print where the results are, unless the final table shows it."""
        if not (self.quiet or self.loop.reporting.table):
            self.print_where_results_are()

    def after_predict(self) -> None:
        if self.prediction_writer is not None and not self.quiet and self.trainer.is_global_zero:
            print(f"Predictions: {self.prediction_writer.where}")


def _check_checkpoint(path: str) -> None:
    is_url = ":" in path
    if is_url or Path(path).exists():
        return
    checkpoints = map(str, Path().glob("*/*/checkpoints/*.ckpt"))
    raise ConfigurationError(
        f"there is no checkpoint {path}.{nearest(path, checkpoints)} --ckpt_path last uses the newest one "
        "in the run's folder."
    )


def _with_default_checkpoints(callbacks: Any) -> list[L.Callback]:
    """Return the configured callbacks (a list, one or None) and those that save checkpoints, if none of them does."""
    configured_callbacks = callbacks or []
    if not isinstance(configured_callbacks, list):
        configured_callbacks = [configured_callbacks]
    return [*configured_callbacks, *default_checkpoints(configured_callbacks)]


def make_cli(
    args: list[str] | None = None,
    run: bool = True,
    quiet: bool = False,
    starts_anew: bool = False,
) -> FederatedCLI:
    """Parse a command line, build its objects and, with ``run``, run its subcommand."""
    return FederatedCLI(
        L.LightningModule,
        FederatedDataModule,
        run=run,
        subclass_mode_model=True,
        auto_configure_optimizers=True,
        seed_everything_default=0,
        trainer_defaults={"max_epochs": 10, "log_every_n_steps": 1},
        parser_kwargs={"prog": "flsv", "version": code_version()},
        save_config_callback=SavedConfig,
        save_config_kwargs={"save_to_log_dir": False},
        args=args,
        quiet=quiet,
        starts_anew=starts_anew,
    )
