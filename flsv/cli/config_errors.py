"""Short messages for errors in configurations: the key, its line, what was expected, and the nearest name."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import accumulate
from pathlib import Path
from pydoc import locate
from typing import Any

import yaml

from flsv.utilities.errors import ConfigurationError, nearest

_UNKNOWN_OPTION = re.compile(r"does not accept option '(?P<key>[^']+)'")
_KEY_IN_MESSAGE = re.compile(r'^Parser key "(?P<key>[^"]+)":')
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (?P<name>[\w.]+)")
_NOT_IN_MODULE = re.compile(r"module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'")
_UNKNOWN_ARGUMENT = re.compile(
    r"given class_path '(?P<path>[\w.]+)':\s+Option '(?P<name>[\w.]+)' is not accepted"
)
_MISSING_MODULE = re.compile(
    r"given class_path '(?P<path>[\w.]+)':\s+No module named '(?P<name>[\w.]+)'"
)
_PART_OF_VALUE = re.compile(r"NestedArg\(key=\S+ val=(.*)\)", flags=re.DOTALL)
_MAPPING_EXPECTED = "Expected a dict"
#: An argument and its value, as errors of constructors show them.
_ARGUMENT_IN_MESSAGE = re.compile(
    r"\b(?P<name>\w+)=(?:'(?P<text>[^']*)'|(?P<number>[-+.\w]+)|[\[({])"
)
_QUOTED_TEXT = re.compile(r"'([^']+)'")
#: What each option that may be left out would take, too.
_NOTHING_EXPECTED = "Expected a <class 'NoneType'>"


class OptionError(ConfigurationError):
    """Error of jsonargparse on a command line or a configuration.

    Args:
        message: what jsonargparse says.
        options: the dotted names of all options.
        class_names: the names of the classes that may be named without their packages.
    """

    def __init__(
        self,
        message: str,
        options: Collection[str],
        class_names: Collection[str],
    ) -> None:
        super().__init__(message)
        self.options = options
        self.class_names = class_names


def explain(error: OptionError, files: Sequence[Path]) -> str:
    """Return a short message for an error of jsonargparse in one of some configuration files.

    Example:
        >>> said = "Subcommand 'fit' does not accept option 'federation.local_epoch'"
        >>> explain(OptionError(said, ["federation.local_epochs"], []), files=[])
        'federation.local_epoch: there is no such option. Did you mean federation.local_epochs?'
    """
    message = str(error)
    unknown_option = _UNKNOWN_OPTION.search(message)
    if unknown_option is not None:
        key, explanation = _explain_option(unknown_option["key"], error.options)
        _, _, wrong_word = key.rpartition(".")
    else:
        key_match = _KEY_IN_MESSAGE.search(message)
        if key_match is None:
            return message
        key = key_match["key"]
        wrong_word, explanation = _explain_value(message, error.class_names)

    origin = _origin(files, key.split("."), wrong_word)
    return f"{origin}{key}: {explanation}"


def _explain_option(key: str, options: Collection[str]) -> tuple[str, str]:
    """Return the part of a key that is no option's, and what to do."""
    known_keys = {""}  # of the options, and of the sections that they are in
    for option in options:
        known_keys |= set(_prefixes(option))

    # Of a.b.c, the first of a, a.b and a.b.c that there is not, and the section that it is looked for in.
    section = ""
    unknown_key = key
    for prefix in _prefixes(key):
        unknown_key = prefix
        if prefix not in known_keys:
            break
        section = prefix
    _, _, unknown_name = unknown_key.rpartition(".")

    names_in_section = []
    keys_with_same_name = []
    for known_key in known_keys:
        parent, _, name = known_key.rpartition(".")
        if parent == section:
            names_in_section.append(name)
        if name == unknown_name:
            keys_with_same_name.append(known_key)
    # Suggested are options of this name in other sections, else similar names in this section.
    suggestions = sorted(keys_with_same_name)
    if not suggestions:
        for name in get_close_matches(unknown_name, names_in_section):
            suggestions.append(f"{section}.{name}".lstrip("."))
    return unknown_key, f"there is no such option.{_question(suggestions)}"


def _prefixes(key: str) -> Iterator[str]:
    """Yield ``a``, ``a.b`` and ``a.b.c`` for the key ``a.b.c``."""
    return accumulate(key.split("."), "{}.{}".format)


def _explain_value(message: str, class_names: Collection[str]) -> tuple[str, str]:
    """Return the word that is wrong in a value, and what is wrong with it."""
    unknown_class = _UNKNOWN_CLASS.search(message)
    if unknown_class is not None:
        name = unknown_class["name"]
        similar = get_close_matches(name, class_names)
        advice = "A class of your own is named with its module."
        return name, f"there is no class {name}.{_question(similar)} {advice}"

    not_in_module = _NOT_IN_MODULE.search(message)
    if not_in_module is not None:
        name, module = not_in_module["name"], not_in_module["module"]
        names_of_module = vars(sys.modules[module]) if module in sys.modules else ()
        similar = get_close_matches(name, names_of_module)
        return name, f"module {module} has no {name}.{_question(similar)}"

    unknown_argument = _UNKNOWN_ARGUMENT.search(message)
    if unknown_argument is not None:
        name, path = unknown_argument["name"], unknown_argument["path"]
        named_class: Any = locate(path)
        arguments = []
        if isinstance(named_class, type):
            arguments = [*inspect.signature(named_class).parameters]
        similar = get_close_matches(name, arguments) or arguments
        return name, f"{path} has no argument {name}.{_question(similar)}"

    missing_module = _MISSING_MODULE.search(message)
    if missing_module is not None:
        path, name = missing_module["path"], missing_module["name"]
        modules = [file.stem for file in Path.cwd().glob("*.py")]
        question = nearest(name, modules)
        return path, (
            f"{path} cannot be imported: there is no module {name}, neither in this folder nor installed.{question}"
        )

    shown = ""
    value = re.search(r"Given value: (.*)", message, flags=re.DOTALL)
    if value is not None:
        part_of_value = _PART_OF_VALUE.fullmatch(value[1])
        text = value[1] if part_of_value is None else part_of_value[1]
        shown = f", got {_shortened(text)}"
    reasons = "; ".join(_reasons(message))
    if reasons == _MAPPING_EXPECTED:
        reasons = (
            "expected a mapping from names of your choice to what they stand for, such as "
            "{my_metric: ClassSpecificShapley}"
        )
    return "", f"{reasons}{shown}"


def _reasons(message: str) -> Iterator[str]:
    """Yield what jsonargparse expected, without that nothing would do as well."""
    # Below the first line, which names the option:
    #   Does not validate against any of the Union subtypes
    #   Subtypes: [<class 'int'>, <class 'NoneType'>]
    #   Errors:
    #     - Expected a <class 'int'>
    #     - Expected a <class 'NoneType'>
    #   Given value type: <class 'str'>
    # Without a union there is only the text of one error.
    _first_line, _, later_lines = message.partition("\n")
    text_before_value, _, _value = later_lines.partition("Given value")
    # The text after the last "Errors:", or all text if it is not there.
    _, _, errors = text_before_value.rpartition("Errors:")
    for line in (errors or text_before_value).splitlines():
        reason = line.strip(" -")
        is_heading = reason.startswith(("Does not validate", "Subtypes"))
        if reason and reason != _NOTHING_EXPECTED and not is_heading:
            yield re.sub(r"<class '([\w.]+)'>", r"\1", reason)


def _question(similar: Sequence[str]) -> str:
    if not similar:
        return ""
    return f" Did you mean {' or '.join(similar[:2])}?"


def _shortened(value: str, length: int = 160) -> str:
    text = " ".join(value.split())
    if len(text) <= length:
        return text
    return f"{text[:length]} ..."


def _origin(files: Sequence[Path], keys: Sequence[str], wrong_word: str) -> str:
    """Return the file and line of a key, or of a word in its value, or ""."""
    for path in reversed(files):
        root = yaml.compose(path.read_text("utf-8"))
        line_number = _line_number(root, keys, wrong_word)
        if line_number is not None:
            return f"{path}, line {line_number}: "
    return ""


def _line_number(node: Any, keys: Sequence[str], word: str) -> int | None:
    """Return the number of the line where the mappings' ``keys`` lead, and ``word`` in it, or None."""
    key_mark = None
    for key in keys:
        entry = _entry_of_mapping(node, key)
        if entry is None:
            return None
        key_node, node = entry
        key_mark = key_node.start_mark
    for descendant in _scalars(node):
        if descendant.value == word or descendant.value.endswith(f".{word}"):
            return int(descendant.start_mark.line) + 1
    if key_mark is None:
        return None
    return int(key_mark.line) + 1


def _entry_of_mapping(node: Any, key: str) -> tuple[yaml.Node, yaml.Node] | None:
    """Return the nodes of a mapping's key and of its value, or None."""
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            if key_node.value == key:
                return key_node, value_node
    return None


def origin_of(message: str, files: Sequence[Path]) -> str:
    """Return the file and line of the argument or text that a message is about, if it stands in one line, or ""."""
    if any(message.startswith(str(path)) for path in files):
        return ""
    # The first search that has one result in all files together.
    roots = {path: yaml.compose(path.read_text("utf-8")) for path in files}
    for find_lines in _searches_for(message):
        origins = []
        for path, root in roots.items():
            origins += [f"{path}, line {line}: " for line in find_lines(root)]
        if len(origins) == 1:
            return origins[0]
    return ""


def _searches_for(message: str) -> list[Callable[[Any], Iterator[int]]]:
    """Return functions that yield the lines below a node on what a message names."""
    searches: list[Callable[[Any], Iterator[int]]] = []
    argument = _ARGUMENT_IN_MESSAGE.search(message)
    if argument is not None:
        value = argument["text"] or argument["number"]
        searches.append(
            partial(_lines_of_entry, name=argument["name"], value=value, message=message)
        )
    for text in _QUOTED_TEXT.findall(message):
        searches.append(partial(_lines_of_value, text=text))
    return searches


def _entries(node: Any) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """Yield all keys below a node with their values, and items of lists with themselves."""
    if not isinstance(node, yaml.CollectionNode):
        return
    for child in node.value:
        if isinstance(child, tuple):
            key_node, value_node = child
        else:  # an item of a list has no key
            key_node = value_node = child
        yield key_node, value_node
        yield from _entries(value_node)


def _lines_of_entry(root: Any, name: str, value: str | None, message: str) -> Iterator[int]:
    """Yield the lines of entries with the name and the value, or a list that the message tells."""
    for key_node, value_node in _entries(root):
        if key_node.value != name:
            continue
        if isinstance(value_node, yaml.ScalarNode):
            is_named = value_node.value == value
        else:  # a message on a mapping or a list shows all scalars in it
            is_named = all(scalar.value in message for scalar in _scalars(value_node))
        if is_named:
            yield int(key_node.start_mark.line) + 1


def _lines_of_value(root: Any, text: str) -> Iterator[int]:
    """Yield the lines of values that are a text."""
    for _, value_node in _entries(root):
        if value_node.value == text:
            yield int(value_node.start_mark.line) + 1


def _scalars(node: Any) -> Iterator[yaml.ScalarNode]:
    """Yield all keys and values below a node."""
    if isinstance(node, yaml.ScalarNode):
        yield node
        return
    for child in node.value:
        if isinstance(child, tuple):
            key_node, value_node = child
            yield from _scalars(key_node)
            yield from _scalars(value_node)
        else:
            yield from _scalars(child)
