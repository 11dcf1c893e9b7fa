"""Lightning's private names that flsv uses: a new version of Lightning may change them."""

import ast
import re
from pathlib import Path

import lightning
import pytest

import flsv

NAMES = {
    "_DataHookSelector", "_DataLoaderSource", "_EvaluationLoop", "_FitLoop", "_LoggerConnector",
    "_SubprocessScriptLauncher", "_accelerator_connector", "_batches_that_stepped",
    "_build_step_args_from_hook_kwargs", "_callback_metrics",
    "_compiler_ctx", "_current_fx_name", "_data_connector", "_data_source", "_datahook_selector",
    "_default_hp_metric", "_fabric", "_first_loop_iter", "_init_optimizers_and_lr_schedulers",
    "_logged_metrics", "_logger_connector", "_metric_attributes", "_mode",
    "_on_before_batch_transfer",
    "_results", "_run_subcommand", "_store_dataloader_outputs",
    "_swap_models", "_unwrap_objects",
}  # fmt: skip
#: Of a method of Lightning that flsv's command line overrides.
OVERRIDDEN = {"_run_subcommand"}
#: Of flsv's own objects or of torch's, which Lightning has, too.
OTHERS = {
    "_computed",
    "_load",
    "_modules",
    "_start",
    "_trainer",
    "_module",
    "_run",
    "_stage",
    "_timeout",
    "_version",
}


def private_names_of_lightning() -> set[str]:
    source = "\n".join(path.read_text() for path in Path(lightning.__file__).parent.rglob("*.py"))
    return {
        *re.findall(r"(?:def|class) (_[A-Za-z]\w*)", source),
        *re.findall(r"self\.(_[a-z]\w*)\b.*?=", source),
    }


def private_names_of_others(tree: ast.AST) -> set[str]:
    """Private names that are imported from Lightning, asked of another object than ``self``, or given as a string."""
    is_private = re.compile(r"_[A-Za-z]\w*").fullmatch
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):  # imported from Lightning
            if (node.module or "").startswith("lightning"):
                names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):  # of another object
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not is_own:
                names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # as for getattr
            names.add(node.value)

    return {name for name in names if is_private(name)}


def private_names_by_file() -> dict[str, set[str]]:
    """Lightning's private names that each file of flsv uses."""
    root = Path(flsv.__file__).parent
    private_names = private_names_of_lightning() - OTHERS
    names_by_file = {}
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = private_names_of_others(tree)
        names_by_file[path.relative_to(root).as_posix()] = names & private_names

    return names_by_file


@pytest.mark.slow
def test_private_lightning_names_in_use_are_those_listed():
    assert set().union(*private_names_by_file().values()) == NAMES


@pytest.mark.slow
def test_private_lightning_names_stand_in_one_package():
    for file, names in private_names_by_file().items():
        if not file.startswith("_lightning/"):
            assert names <= OVERRIDDEN, f"{file}: move {names} to flsv/_lightning, with the reason"
