"""Explanations of jsonargparse's errors, with the line that is wrong and names that may have been meant."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from flsv.utilities.errors import ConfigurationError, similar_names

#: A name in quotes, or after a colon.
_NAME_IN_MESSAGE = re.compile(r"'([\w.]+)'|: (?:--)?([\w.]+)")
_KEY_IN_MESSAGE = re.compile(r'key "([\w.]+)"')
_CHOICES_IN_MESSAGE = re.compile(r"Literal\[(.+)\]")
_PROBLEM_IN_MESSAGE = re.compile(r"Problem with given class_path '([\w.]+)':\s+(.+)")
_PROBLEM_OF_CALLABLE = re.compile(
    r"callable class: (Option '\S+' is not accepted|unrecognized arguments: .+)\. "
    r"Got value: Namespace\(class_path='([\w.]+)'"
)
#: A class, and an argument that it does not accept.
_UNKNOWN_ARGUMENT = re.compile(r": ([\w.]+): (?:Option '|unrecognized arguments: --)([\w.]+)")
#: The expected value: an instance of a class, one of some texts, or the name of a class instead of the wrong name.
_EXPECTED_IN_MESSAGE = re.compile(
    r"Expected (?:an? )?(?:<class '[\w.]*?(\w+)'>|typing\.Literal\[(.+?)\]|dot import path string: (\S+))"
)
_AMBIGUOUS_NAME = re.compile(r"Multiple subclasses with name .+")
_VALUE_GIVEN = re.compile(r"(?:Given|Got) value: (.+?)(?:\. Got value|$)", flags=re.MULTILINE)
#: An option of a class on the command line, below the option that names the class, and its value.
_NESTED_OPTION_IN_MESSAGE = re.compile(r"NestedArg\(key='([\w.]+)', val='(.*)'\)")
_PLAIN_VALUES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "dict": "{name: value}",
    "str": "a text",
}
#: An argument whose value follows, or a text in quotes, as errors of constructors show them.
_VALUE_IN_MESSAGE = re.compile(r"\b(\w+)=|'([^']+)'")
#: The arguments with which a message on a call begins, as in ``FedAvgM(momentum=2.0): ...`` or ``client='Oslo': ...``.
_ARGUMENTS_IN_MESSAGE = re.compile(r"(?:\w+\((\w+=.+?)\)|(\w+='[^']*'))(?=[: ])")

#: Arguments whose options have another name.
_OPTIONS_OF_ARGUMENTS = {"amount": "budget", "coalitions": "trainings"}


class OptionError(ConfigurationError):
    """Error of jsonargparse on a command line or a configuration.

    Args:
        message: what jsonargparse says.
        names: the dotted names of all options, and the classes that may be named without their packages.
        default_classes: ``{option: class path}`` of the classes to which options below ``option.init_args`` belong.
    """

    # The default allows errors of other processes to be unpickled: pickle sets the names afterwards.
    def __init__(
        self,
        message: str,
        names: Collection[str] = (),
        default_classes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.names = names
        self.default_classes = dict(default_classes)


def explain(
    error: OptionError,
    files: Sequence[Path],
    words: Sequence[str] = (),
) -> str:
    """Return an error's message with the file and line that it is about, and with names that may have been meant.

    Example:
        >>> said = "Subcommand 'fit' does not accept option 'federation.local_epoch'"
        >>> words = ["--federation.local_epoch=2"]
        >>> print(explain(OptionError(said, ["federation.local_epochs"]), files=[], words=words))
        Subcommand 'fit' does not accept option 'federation.local_epoch'
        Did you mean --federation.local_epochs?
        >>> said = '''Parser key "trainer.max_epochs": Expected a <class 'int'>. Got value: five'''
        >>> print(explain(OptionError(said), files=[], words=["--trainer.max_epochs=five"]))
        --trainer.max_epochs: expected a whole number, got five.
    """
    message = str(error).strip()
    texts = [path.read_text("utf-8") for path in files]
    problem = _problem_in(message)
    misspelt_word = suggestion = ""
    names = _accepted_names(error, words, configs=[yaml.safe_load(text) for text in texts])
    unknown_argument = _UNKNOWN_ARGUMENT.match(problem.text)
    if unknown_argument is not None:
        class_path, argument = unknown_argument.groups()
        misspelt_word, suggestion = _suggestion_of_class(
            problem.option, class_path, argument, names
        )
    elif problem.may_be_misspelt:
        misspelt_word, suggestion = _suggestion(message, names, texts=[*words, *texts])
    wrong_word = misspelt_word or _last_part(problem.option)

    if _stands_in(words, wrong_word):
        return _text_for_command_line(problem, suggestion)
    line_of_word = ""
    for line, _value_texts in _lines_with(wrong_word, files):
        line_of_word = line  # a later file overrides earlier ones
    return f"{line_of_word}{problem.option}{problem.text}{suggestion}"


class _Problem(NamedTuple):
    """A problem with an option, and whether a name may be misspelt."""

    option: str
    text: str
    may_be_misspelt: bool


def _text_for_command_line(problem: _Problem, suggestion: str) -> str:
    # On the command line options begin with dashes, and leave init_args out.
    suggestion = suggestion.replace(".init_args.", ".")
    option_begins = r"\w" if problem.text.startswith("unrecognized arguments") else r"\w+\."
    suggestion = re.sub(rf"(mean|or) (?={option_begins})", r"\1 --", suggestion)
    dashes = "--" if problem.option else ""
    return f"{dashes}{problem.option}{problem.text}{suggestion}"


def _problem_in(message: str) -> _Problem:
    # jsonargparse lists all types that it has tried, beginning with those of the innermost option.
    keys = [key for key in dict.fromkeys(_KEY_IN_MESSAGE.findall(message)) if key != "config"]
    if not keys:
        return _Problem("", message, may_be_misspelt=True)
    option = ".".join(keys)
    nested_option = _NESTED_OPTION_IN_MESSAGE.search(message)
    if nested_option is not None:
        option = f"{keys[0]}.{nested_option[1]}"
    problems = _problems_in_classes(message)
    if problems:
        return _Problem(option, problems[-1], may_be_misspelt=True)
    value_match = _VALUE_GIVEN.search(message)

    ambiguous_name = _AMBIGUOUS_NAME.search(message)
    if ambiguous_name is not None:
        text = f": {ambiguous_name[0]}"
    elif "is abstract" in message:
        text = f": expected the name of a class in {keys[0]} first."
    elif value_match is None:
        text = ": expected a section of options."
    else:
        return _problem_with_value(option, message, value_match)
    return _Problem(option, text, may_be_misspelt=False)


def _problems_in_classes(message: str) -> list[str]:
    problems = [
        f": {class_path}: {problem}."
        for class_path, problem in _PROBLEM_IN_MESSAGE.findall(message)
        if "Parser key" not in problem
    ]
    for problem, class_path in _PROBLEM_OF_CALLABLE.findall(message):
        problems.append(f": {class_path}: {problem}.")
    return problems


def _problem_with_value(option: str, message: str, value_match: re.Match[str]) -> _Problem:
    """Say what was expected instead of a value. A name may be misspelt if that is one."""
    value = value_match[1]
    kinds = []
    names = []
    # Each match has one of the three texts.
    for kind, choices, class_name in _EXPECTED_IN_MESSAGE.findall(
        message, endpos=value_match.end()
    ):
        if kind in _PLAIN_VALUES:
            kinds.append(_PLAIN_VALUES[kind])
        if choices:
            names.append(choices.replace(", ", " or "))
        if class_name:
            names.append("the name of a class")
            value = class_name
    if _PLAIN_VALUES["float"] in kinds:
        names.clear()  # the other choices are tensors and other objects that a number may be replaced by
    expected = " or ".join(dict.fromkeys([*kinds, *names]))
    return _Problem(option, f": expected {expected}, got {value}.", may_be_misspelt=bool(names))


def naming_options(message: str, words: Sequence[str]) -> str:
    """Return the message of a call's error with the command line's options in place of the call's arguments.

    Example:
        >>> naming_options("FedAvgM(momentum=2.0): expected less.", ["--federation.aggregator.momentum=2"])
        '--federation.aggregator.momentum 2.0: expected less.'
    """
    match = _ARGUMENTS_IN_MESSAGE.match(message)
    if match is None:
        return message
    options = []
    for argument in re.split(r", (?=\w+=)", match[1] or match[2]):
        name, _, value = argument.partition("=")
        name = _OPTIONS_OF_ARGUMENTS.get(name, name)
        typed_options = set(_options_called(name, words))
        if len(typed_options) != 1:  # it stands in a file, or two options have this name
            return message
        options.append(f"{typed_options.pop()} {value}")
    return " ".join(options) + message[match.end() :]


def _options_called(
    name: str,
    words: Sequence[str],
) -> Iterator[str]:
    """Yield the options of a command line whose last part is the name of an argument."""
    for word in words:
        option, _, _ = word.partition("=")
        argument = _last_part(option.removeprefix("--")).replace("-", "_")
        if option.startswith("--") and argument == name:
            yield option


def _suggestion_of_class(
    option: str, class_path: str, argument: str, option_names: Collection[str]
) -> tuple[str, str]:
    """Return the wrong word in an argument that a class does not accept, and the options that may be meant, or "".

    The argument may be part of the ``option``, as on the command line.
    """
    accepted_arguments = _arguments_of(class_path)
    unknown_argument = argument
    for prefix in _prefixes(argument):
        if prefix not in accepted_arguments:
            unknown_argument = prefix
            break

    section = option.removesuffix(f".{argument}")
    name_by_last_part = {}
    for name in option_names:  # also below a default class of an argument
        if name.startswith(f"{section}.init_args."):
            name_by_last_part[_last_part(name)] = name
    for name in accepted_arguments:
        name_by_last_part[_last_part(name)] = f"{section}.{name}"

    wrong_word = _last_part(unknown_argument)
    similar_parts = similar_names(wrong_word, name_by_last_part)
    if not similar_parts:
        return wrong_word, ""
    full_names = [name_by_last_part[part] for part in similar_parts]
    return wrong_word, f"\nDid you mean {' or '.join(full_names)}?"


def _arguments_of(class_path: str) -> list[str]:
    """Return the arguments of a class with which jsonargparse calls it, and those of data classes among them."""
    # Here, since most commands need no parser.
    from jsonargparse import ArgumentParser

    imported_class = _imported(class_path)
    if not isinstance(imported_class, type):
        return []
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(imported_class, fail_untyped=False)
    defaults = parser.get_defaults(skip_validation=True)
    # Those of a default class below this one need not be those of the class that is set.
    names = [name for name, _value in defaults.items() if ".init_args." not in name]
    return sorted({prefix for name in names for prefix in _prefixes(name)})


def _accepted_names(error: OptionError, words: Sequence[str], configs: Sequence[Any]) -> list[str]:
    """Return the names of options without those of default classes in whose place another class is named."""
    replaced = []
    for option, default_class in error.default_classes.items():
        named_class = _named_class(option, words, configs)
        if named_class and _last_part(named_class) != _last_part(default_class):
            replaced.append(option)
    prefixes = tuple(f"{option}.init_args." for option in replaced)
    return [name for name in error.names if not name.startswith(prefixes)]


def _named_class(option: str, words: Sequence[str], configs: Sequence[Any]) -> str | None:
    """Return the class that a command line, or else the last of some configurations, names for an option."""
    typed_option = f"--{option.replace('.init_args.', '.')}"
    for word, next_word in zip_longest(words, words[1:], fillvalue=""):
        name, equals_sign, value = word.partition("=")
        if name.removesuffix(".class_path") == typed_option:
            return value if equals_sign else next_word
    for config in reversed(configs):
        section = config
        for key in option.split("."):
            section = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section = section.get("class_path")
        if isinstance(section, str):
            return section
    return None


def _suggestion(
    message: str,
    option_names: Collection[str],
    texts: Sequence[str],
) -> tuple[str, str]:
    """Return the wrong word of a message, which stands in the texts, and the names that may be meant, or "" twice."""
    known_names: list[str] = []
    for name in [*_names_behind(message), *option_names]:
        known_names += _prefixes(name)
    possible_names = _possible_names(message, option_names) or known_names
    name_by_last_part = {_last_part(name): name for name in possible_names}
    for word in _unknown_names(message, known_names):
        similar_parts = similar_names(word, name_by_last_part)
        if similar_parts and _stands_in(texts, word):
            full_names = [name_by_last_part[part] for part in similar_parts]
            return word, f"\nDid you mean {' or '.join(full_names)}?"
    return "", ""


def _possible_names(
    message: str,
    option_names: Collection[str],
) -> list[str]:
    """Return the names that a message's wrong word can stand for, none if it can stand for any."""
    choices = re.findall(r"[\w.+-]+", " ".join(_CHOICES_IN_MESSAGE.findall(message)))
    options = [name for name in option_names if not name[0].isupper()]  # without classes
    if choices:
        return choices
    if "is not accepted" in message:  # an option of a class
        return [*_names_behind(message), *options]
    if message.startswith("unrecognized arguments"):
        return options
    return []


def _stands_in(texts: Sequence[str], word: str) -> bool:
    return any(re.search(rf"\b{re.escape(word)}\b", text) for text in texts)


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _prefixes(name: str) -> Iterator[str]:
    """Yield ``a``, ``a.b`` and ``a.b.c`` for the name ``a.b.c``."""
    return accumulate(name.split("."), "{}.{}".format)


def _names_in(message: str) -> Iterator[str]:
    for match in _NAME_IN_MESSAGE.finditer(message):
        yield match[1] or match[2]


def _names_behind(message: str) -> Iterator[str]:
    """Yield a message's choices, the arguments of its classes, and the attributes of its modules."""
    for choices in _CHOICES_IN_MESSAGE.findall(message):
        yield from re.findall(r"[\w.+-]+", choices)
    for path in _names_in(message):
        imported = _imported(path)
        if isinstance(imported, type):
            with contextlib.suppress(ValueError):  # a class of C may have no signature
                yield from inspect.signature(imported).parameters
        elif imported is not None:
            yield from dir(imported)


def _unknown_names(
    message: str,
    known_names: Collection[str],
) -> Iterator[str]:
    """Yield the first part that is unknown of each dotted name in a message."""
    for name in _names_in(message):
        for prefix in _prefixes(name):
            if prefix not in known_names and _imported(prefix) is None:
                yield _last_part(prefix)
                break


def _imported(path: str) -> Any:
    """Return the module, or the object of a module, that has been imported from a path, or None."""
    module_name, _, name = path.rpartition(".")
    module = sys.modules.get(path)
    if module is not None:
        return module
    return getattr(sys.modules.get(module_name), name, None)


def origin_of(
    message: str,
    files: Sequence[Path],
    words: Sequence[str],
) -> str:
    """Return the file and line of the argument or text that a message is about, if it stands in one line, or ""."""
    if any(message.startswith(str(path)) for path in files):
        return ""
    for match in _VALUE_IN_MESSAGE.finditer(message):
        word = match[1] or match[2]  # an argument's name, or a text in quotes
        if _stands_in(words, word):
            continue
        places = []
        for line, value_texts in _lines_with(word, files):
            has_value_of_message = all(text in message for text in value_texts)
            if has_value_of_message:
                places.append(line)
        if len(places) == 1:
            return places[0]
    return ""


def _lines_with(
    word: str,
    files: Sequence[Path],
) -> Iterator[tuple[str, list[str]]]:
    """Yield the file and line of each key or value that is a word, and the texts of the key's value."""
    for path in files:
        root = yaml.compose(path.read_text("utf-8"))
        for key, value in _entries(root):
            if word not in (key.value, _last_part(str(key.value))):
                continue
            texts = []
            for node, _value in _entries(value):
                if isinstance(node, yaml.ScalarNode):
                    texts.append(node.value)
            yield f"{path}, line {key.start_mark.line + 1}: ", texts


def _entries(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all keys below a node with their values, and all values with themselves."""
    if not isinstance(node, yaml.CollectionNode):
        yield node, node
        return
    for child in node.value:
        if isinstance(child, tuple):
            yield child
            _key, child = child
        yield from _entries(child)
