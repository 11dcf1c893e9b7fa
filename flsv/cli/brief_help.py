"""``flsv fit --help`` on two screens: every option of the data, the federation and the ready-made module, and those of
Lightning's trainer that people set, in the words of their classes' documentation, which is read without importing them.
"""

from __future__ import annotations

import re
import textwrap

from flsv.cli.command import plain
from flsv.cli.names import argument_texts, arguments_of

#: Of Lightning's trainer: those that are set most.
TRAINER = (
    *("max_epochs", "accelerator", "devices", "precision", "logger", "callbacks", "default_root_dir"),
    *("fast_dev_run", "gradient_clip_val", "limit_train_batches"),
)
#: Where the documentation's first words are too many, or those of another reader.
_INSTEAD = {
    "trainer.max_epochs": "rounds of the federation (default: 10)",
    "trainer.default_root_dir": "where runs are written (default: runs)",
    "trainer.logger": "where curves go; default: TensorBoard, false: nowhere",
    "trainer.callbacks": "Lightning callbacks; --trainer.callbacks+ adds one",
    "trainer.fast_dev_run": "one batch of everything, to find mistakes",
    "trainer.accelerator": "cpu, gpu, mps, or auto, which is the default",
    "trainer.precision": "32-true (default), 16-mixed, bf16-mixed, 64-true",
    "trainer.gradient_clip_val": "the value at which to clip gradients",
    "trainer.limit_train_batches": "share or number of each client's batches",
    "trainer.devices": "how many, or which; several: clients are shared out",
    "data.labels": "the column to predict, or each sample's class",
    "data.groups": "natural group of each sample, or the column of it",
    "data.val": "data to validate with on the server",
    "data.test": "data that no client has",
    "data.source": "a name (digits, cifar10), a file or folder, or a data module",
}
WIDTH, COLUMN = 80, 34
#: Options of all four commands.
COMMON = (
    ("-c, --config CONFIG", "a YAML file, or the name of one that comes with flsv; give several: later ones override"),
    ("--print_config", "print all that has been configured so far, as YAML to save and edit, and stop"),
    ("--seed_everything N", "of all random choices (default: 0)"),
    ("--ckpt_path PATH", "a checkpoint: its path, last, or best"),
    ("--help=all", "all options, with types, defaults and known classes"),
    ("--quiet, -q", "no progress, no tables: warnings, errors and files only"),
)
SECTIONS = {
    "federation": "The federation: who trains how, and what is measured",
    "data": "The data: whose they are, and how they are dealt out",
    "model": "The model: --model my_package.MyModule, or flsv.ClassifierClient, which has",
    "trainer": "Lightning's trainer: the most used of {} options",
}


def brief_help(command: str, about: str) -> str:
    """What ``flsv fit --help`` prints.

    Args:
        command: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        about: what it does.
    """
    lines = [f"usage: flsv {command} [--config CONFIG ...] [options]", "", f"{about[0].upper()}{about[1:]}.", ""]
    lines += [line for option, text in COMMON for line in _entry(option, text)]
    for section, title in SECTIONS.items():
        texts = argument_texts(section)
        names = TRAINER if section == "trainer" else list(texts)
        lines += ["", f"{title.format(len(arguments_of(section)))}:"]
        for name in names:
            said = _INSTEAD.get(f"{section}.{name}") or in_short(texts.get(name, ""))
            lines += _entry(f"--{section}.{name}", said)
    last = (
        "A class is named by --federation.aggregator ShapFedWA, and its arguments by --federation.aggregator.metric "
        "cssv; --federation.aggregator.help ShapFedWA shows them."
    )
    return "\n".join([*lines, "", textwrap.fill(last, WIDTH)])


def in_short(text: str) -> str:
    """The first statement of an argument's text.

    Example:
        >>> in_short("draws each round's cohort, see :mod:`flsv.sampling`. Default: every client.")
        "draws each round's cohort"
    """
    words = plain(" ".join(text.split()))
    return re.split(r"[.:;](?:\s|$)|, (?:such as|see|in this order|one after|where|by default|and what)\b", words)[0]


def _entry(option: str, text: str) -> list[str]:
    start = f"  {option}"
    room = " " * COLUMN
    first = start.ljust(COLUMN) if len(start) < COLUMN - 1 else f"{start}  "
    return textwrap.wrap(first + text, WIDTH, subsequent_indent=room, break_long_words=False, drop_whitespace=True)
