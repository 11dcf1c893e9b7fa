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

import pytest
import yaml

import flsv
from flsv.cli import main
from flsv.sites.policy import SitePolicy
from helpers.forked import Forked

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
    commands = []
    for line in text.replace("\\\n", " ").splitlines():
        for part in line.split(" && "):
            words = shlex.split(part, comments=True)
            if words:
                commands.append(words)
    return commands


def commands_of(page_blocks):
    commands = []
    for block in page_blocks:
        if block.language == "bash":
            commands += split_commands(block.text)
    return commands


def run_page(page, run=None):
    """Run all that a page shows, in the working folder; the number of its blocks. Commands are run by ``run``, else by
    :func:`run_command`."""
    page_blocks = blocks_of_page(page)
    commands = commands_of(page_blocks)
    namespace = {"__name__": "__page__"}
    for block in page_blocks:
        if block.title in QUOTED:
            check_quotation(block)
            continue
        if block.title is not None:
            write_file(block)
        run_block(block, commands, namespace, run or run_command)

    return len(page_blocks)


#: Output, data, and "py": a part of the code, which does not run alone.
ONLY_SHOWN = ("py", "text", "csv", "markdown")


def run_block(block, commands, namespace, run):
    """Run a block of Python or of commands, and check one of another language."""
    if block.language == "python":
        run_python(block, commands, namespace)
    elif block.language == "bash":
        for command in split_commands(block.text):
            run(command)
    elif block.language == "yaml":
        check_configuration(block, commands)
    elif block.language == "toml":
        assert block.title, f"a file without a title:\n{block.text}"
        SitePolicy.read(Path(block.title))
    else:
        is_known = block.language in ONLY_SHOWN
        assert is_known, f"blocks of {block.language} are neither run nor checked"


def run_python(block, commands, namespace):
    """Run a block of Python here, unless one of the page's commands runs its file."""
    run_of_file = ["python", block.title]
    is_run_by_command = any(command[:2] == run_of_file for command in commands)
    if not is_run_by_command:
        code = compile(block.text, block.title or "<page>", "exec")
        exec(code, namespace)


def without_indents(text):
    """The lines of a text from their first character on: a page shows the inside of a function without its indents."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


def check_quotation(block):
    quoted_file = QUOTED[block.title].read_text()
    is_quoted = without_indents(block.text) in without_indents(quoted_file)
    assert is_quoted, f"{block.title} does not say so (any more)"


def write_file(block):
    path = Path(block.title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text)


def check_configuration(block, commands):
    """Check that a configuration can be read, and that a command names it."""
    assert isinstance(yaml.safe_load(block.text), dict), block.text
    assert block.title, f"a configuration without a title, which no command names:\n{block.text}"

    names = {block.title, block.title.removesuffix(".yaml")}
    is_named = any(names & set(command) for command in commands)
    assert is_named, f"{block.title}: no command runs it"


def run_command(command):
    """Run one command of flsv, Python, pytest or ssh-keygen, into a file where it says so; others must be listed."""
    is_redirected = len(command) > 2 and command[-2] == ">"
    if is_redirected:
        *words, _, file_name = command
        with open(file_name, "w") as file, redirect_stdout(file):
            run_command(words)
        assert Path(file_name).read_text()
        return

    program, *arguments = command
    line = " ".join(command)
    if any(line.startswith(prefix) for prefix in NOT_RUN):
        return
    if program == "flsv":
        check_status(command, lambda: main(make_quiet(arguments)))
    elif program == "python" and arguments[0].endswith(".py"):
        check_status(command, lambda: run_script(arguments))
    elif program == "pytest" and Path(arguments[-1]).exists():
        run_tests(arguments[-1])
    elif program == "ssh-keygen":
        if shutil.which(program):
            subprocess.run([*map(os.path.expanduser, command)], check=True)
    else:
        raise AssertionError(f"{command} is neither run nor listed")


def check_status(command, run):
    try:
        status = run()
    except SystemExit as exit_request:  # of --print_config, --help and scripts
        status = exit_request.code
    assert not status, command


def make_quiet(arguments):
    """Return arguments of flsv without a progress bar, or without a run where it needs what a test has not got."""
    subcommand = arguments[0]
    line = " ".join(arguments)
    if subcommand == "fit" and any(word in line for word in ONLY_READ):
        return [*arguments, "--print_config"]
    if subcommand in ("fit", "validate", "test", "predict"):
        return [*arguments, *QUIET]
    return arguments


def run_script(arguments):
    script = Path(arguments[0])
    if script.parts[0] == "tools":
        script = ROOT / script
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        runpy.run_path(str(script), run_name="__main__")


def run_tests(path):
    options = ["-q", "-p", "no:cacheprovider"]
    status, output = Forked(Path.cwd(), pytest.main, [*options, path]).wait()
    assert status == 0, output


def text_of_page(page):
    """A line per heading, paragraph, item and row, with bars around the cells; charts are left out."""
    _, _, body = page.read_text(encoding="utf-8").partition("</style>")
    on_one_line = " ".join(body.split())
    without_charts = re.sub(r"<svg.*?</svg>", "", on_one_line)

    with_bars = re.sub(r"\s*<t[dh]\b[^>]*>", "| ", without_charts)
    with_bars = re.sub(r"</t[dh]>", " ", with_bars)
    with_lines = with_bars.replace("</tr>", "|\n")
    with_lines = re.sub(r"</(p|li|h\d|figcaption|section)>", "\n", with_lines)

    lines = []
    for line in with_lines.splitlines():
        without_tags = re.sub(r"<[^>]*>", "", line)
        text = html.unescape(without_tags).strip()
        if text:
            lines.append(text)
    return "\n".join(lines).replace("\u00a0", " ")


def words_in(text):
    """A text's words, without line ends and the bullets of a list."""
    return " ".join(text.split()).replace(" - ", " ")
