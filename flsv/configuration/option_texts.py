"""Texts of a configuration file's options that determine a run's results, and hashes of the code that they name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path, PurePath
from pydoc import locate
from typing import Any

from flsv.utilities.formats import PACKAGES, version_settings
from flsv.utilities.plain_values import digest

#: Options that change no result: those for folders, output and speed. ``loader.eval_batch_size`` does change results if
#: a module logs values with a batch_size of its own.
IDLE_OPTIONS = {
    "trainer": {
        "logger", "default_root_dir", "log_every_n_steps", "enable_checkpointing", "enable_progress_bar",
        "enable_model_summary", "num_sanity_val_steps", "profiler", "devices", "num_nodes", "strategy", "benchmark",
    },
    "data": {
        "files.root", "files.download", "loader.num_workers", "loader.pin_memory", "loader.on_device",
        "loader.eval_batch_size",
    },
    "federation": {"reporting", "seed"},
}  # fmt: skip
#: Sections of a configuration that determine a run's results.
SECTIONS = ("model", "optimizer", "lr_scheduler", "data", "federation", "trainer")
#: Packages whose classes' source is not hashed.
INSTALLED_PACKAGES = {
    "flsv",
    *PACKAGES,
    "torchvision",
    "torchmetrics",
    "timm",
    *sys.stdlib_module_names,
}


def config_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return ``{dotted name: text}`` of the options and the code of ``flsv fit`` that determine its results."""
    settings = version_settings() | option_texts(config)
    present_sections = [section for section in SECTIONS if config.get(section)]
    for section in present_sections:
        for name, value in _leaves(config[section], section):
            is_class = name.endswith("class_path")
            if name not in settings or not is_class:
                continue
            hash_of_code = source_hash_of(locate(str(value)))
            if hash_of_code:
                settings[f"{name}, its code"] = hash_of_code
    return settings


def option_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return ``{dotted name: text}`` of the options of ``flsv fit`` that determine its results."""
    return {name: text for name, text in _all_option_texts(config).items() if text != "None"}


def other_options(
    config: Mapping[str, Any], reference: Mapping[str, Any], template: str
) -> list[str]:
    """Describe by ``template`` each option that determines results, and that differs from ``reference``.

    An option that one of the two does not name, as a version that did not know it, has its default there.

    Example:
        >>> earlier = {"trainer": {"max_epochs": 3}}
        >>> other_options({"trainer": {"max_epochs": 2, "min_epochs": 1}}, earlier, "is {}, and not {}")
        ['trainer.max_epochs is 2, and not 3']
    """
    options = _all_option_texts(config)
    reference_options = _all_option_texts(reference)
    differences = []
    for name in {**reference_options, **options}:
        is_class = name.endswith("class_path")
        if not is_class and (name not in options or name not in reference_options):
            continue
        text = options.get(name, "None")
        reference_text = reference_options.get(name, "None")
        if text != reference_text:
            differences.append(f"{name} {template.format(text, reference_text)}")
    return differences


def _all_option_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return ``{dotted name: text}`` of the options that determine results, also of those that are None."""
    texts = {}
    present_sections = [section for section in SECTIONS if config.get(section)]
    for section in present_sections:
        for name, value in _leaves(config[section], section):
            if _is_idle(name, section):
                continue
            if section == "data" and isinstance(value, str):
                # The folder does not matter, since hashes of the samples are compared.
                texts[name] = repr(PurePath(value).name)
            else:
                texts[name] = repr(value)
    return texts


def _is_idle(name: str, section: str) -> bool:
    """Return whether an option changes no result."""
    is_data_root = section == "data" and name.endswith(".root")
    return is_data_root or _is_one_of(name, IDLE_OPTIONS.get(section, set()))


def _is_one_of(name: str, options: Set[str]) -> bool:
    """Return whether a name, as ``data.files.root``, is in or below one of its section's options, as ``files``."""
    path = name.split(".")[1:]  # below the section
    suboption = ".".join(path[:2])
    return path[0] in options or suboption in options


def source_hash_of(class_or_function: Any) -> str:
    """Compute a hash of the source files of a class and its bases, or of a function. "" for installed packages."""
    definitions = [class_or_function]
    if isinstance(class_or_function, type):
        definitions = list(class_or_function.__mro__)
    sources = []
    for definition in definitions:
        module_name = getattr(definition, "__module__", None) or "builtins"
        package, _, _ = module_name.partition(".")
        if package in INSTALLED_PACKAGES:
            continue
        file = inspect.getsourcefile(definition)
        if file and Path(file).is_file():
            sources.append(Path(file).read_text(encoding="utf-8"))
        else:
            sources.append(inspect.getsource(definition))
    if not sources:
        return ""
    return digest(sources).hex()[:12]


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}")
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}.{index}")
    else:
        yield name, value
