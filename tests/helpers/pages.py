"""Runs what a page shows: its Python and YAML blocks and its commands, in their order, in a folder of their own.

Python blocks of a page share one namespace. A block with a title is a file: YAML and data are written, Python is
written and run where a command says ``python title``. Commands of flsv run in this process; what no test can run is
listed below, by how it begins and why. Whoever calls this sees to it that fits are short.
"""

import html
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import yaml

import flsv
from flsv.cli import main
from flsv.sites.policy import SitePolicy

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"^( *)```(\w+)(?: +title=\"([^\"]+)\")?\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE
)
QUIET = ["--trainer.enable_progress_bar", "false"]
#: Of programs that are not flsv: how a command begins, and where else it is run or why not at all.
NOT_RUN = {
    "pip install": "changes the environment; the wheel's test installs one",
    "tensorboard": "a server that does not end",
    "make": "the targets are what CI itself runs",
    "pytest -n 2": "all tests, of which this is one",
    "dask": "servers; tests/retraining starts a cluster of this machine",
    "flsv retrain lightning_logs/version_0 --backend dask": "minutes on such a cluster; the same",
    "export": "of the shell",
}
#: Blocks that are quoted from a file which is tested elsewhere.
QUOTED = {
    "fedapp/federation.py": Path(flsv.__file__).parent
    / "sites/templates/flower/fedapp/federation.py",
    "job/app/custom/federation.py": Path(flsv.__file__).parent
    / "sites/templates/nvflare/job/app/custom/federation.py",
    "fedapp/server_app.py": Path(__file__).parents[1] / "outside/server_app.py",
}
#: Arguments of flsv that a test has not got what they need for: the configuration is then read, and not run.
ONLY_READ = ("--trainer.strategy", "gpu")


def without_indents(text):
    """The lines of a text from their first character on: a page shows the inside of a function without its indents."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


class Block(NamedTuple):
    language: str
    title: str | None
    text: str


def blocks_of_page(page):
    """The blocks of a page in Python, YAML, shell or data; output is ``text``."""
    page_blocks = []
    for indent, language, title, text in _BLOCK.findall(page):
        lines = [line.removeprefix(indent) for line in text.splitlines()]
        page_blocks.append(Block(language, title or None, "\n".join(lines) + "\n"))
    return page_blocks


def split_commands(text):
    """The commands of a shell block, as lists of words, without comments and prompts."""
    lines = text.replace("\\\n", " ").splitlines()
    words = [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]
    return [command for command in words if command]


def run_page(page, run=None):
    """Run all that a page shows, in the working folder; the number of its blocks. Commands are run by ``run``, else by
    :func:`run_command`."""
    page_blocks = blocks_of_page(page)
    called = [
        command
        for block in page_blocks
        if block.language == "bash"
        for command in split_commands(block.text)
    ]
    scope = {"__name__": "__page__"}
    for block in page_blocks:
        if block.title in QUOTED:
            quoted_file = QUOTED[block.title].read_text()
            assert without_indents(block.text) in without_indents(quoted_file), (
                f"{block.title} does not say so (any more)"
            )
            continue
        if block.title is not None:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text)
        if block.language == "python" and ["python", block.title] not in [
            words[:2] for words in called
        ]:
            exec(compile(block.text, block.title or "<page>", "exec"), scope)
        elif block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict), block.text
            assert block.title, (
                f"a configuration without a title, so that no command can name it:\n{block.text}"
            )
            names = {block.title, block.title.removesuffix(".yaml")}
            assert any(names & set(words) for words in called), f"{block.title}: no command runs it"
        elif block.language == "bash":
            for command in split_commands(block.text):
                (run or run_command)(command)
        elif block.language == "toml":
            assert block.title, f"a file without a title:\n{block.text}"
            SitePolicy.read(Path(block.title))
        else:
            # "py": a part of the code, which does not run alone
            assert block.language in ("python", "py", "text", "csv", "markdown"), block.language

    return len(page_blocks)


def run_command(command):
    """Run one command of flsv, Python, pytest or ssh-keygen, into a file where it says so; others must be listed."""
    if ">" in command[-2:-1]:
        with open(command[-1], "w") as file, redirect_stdout(file):
            run_command(command[:-2])
        assert Path(command[-1]).read_text()
    elif command[0] == "flsv" and not any(
        " ".join(command).startswith(prefix) for prefix in NOT_RUN
    ):
        try:
            status = main(_quiet(command[1:]))
        except SystemExit as stopped:  # of --print_config and --help
            status = stopped.code
        assert not status, command
    elif command[0] == "python" and command[1].endswith(".py"):
        arguments = sys.argv
        sys.argv = command[1:]
        status = None
        script = Path(command[1])
        if script.parts[0] == "tools":
            script = ROOT / script
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as stopped:
            status = stopped.code
        finally:
            sys.argv = arguments
        assert not status, command
    elif command[0] == "pytest" and Path(command[-1]).exists():
        paths = {**os.environ, "PYTHONPATH": str(Path(flsv.__file__).parents[1])}
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", command[-1]],
            env=paths,
            check=True,
        )
    elif command[0] == "ssh-keygen":
        if shutil.which(command[0]):
            subprocess.run([*map(os.path.expanduser, command)], check=True)
    else:
        assert any(" ".join(command).startswith(prefix) for prefix in NOT_RUN), (
            f"{command} is neither run nor listed"
        )


def _quiet(arguments):
    if arguments[0] == "fit" and any(word in " ".join(arguments) for word in ONLY_READ):
        return [*arguments, "--print_config"]
    return [*arguments, *(QUIET if arguments[0] in ("fit", "validate", "test", "predict") else [])]


def text_of_page(page):
    """A line per heading, paragraph, item and row, with bars around the cells; charts are left out."""
    body = page.read_text(encoding="utf-8").partition("</style>")[2]
    body = " ".join(body.split())
    body = re.sub(r"<svg.*?</svg>", "", body)

    # Cells stand between bars, and each row, paragraph, item and heading ends a line.
    body = re.sub(r"\s*<t[dh]\b[^>]*>", "| ", body)
    body = body.replace("</tr>", "|\n")
    body = re.sub(r"</(p|li|h\d|tr|figcaption|section)>", "\n", body)
    body = re.sub(r"</t[dh]>", " ", body)

    lines = []
    for line in body.splitlines():
        without_tags = re.sub(r"<[^>]*>", "", line)
        text = html.unescape(without_tags).strip()
        if text:
            lines.append(text)
    return "\n".join(lines).replace("\u00a0", " ")


def words_in(text):
    """A text's words, without line ends and the bullets of a list."""
    return " ".join(text.split()).replace(" - ", " ")
