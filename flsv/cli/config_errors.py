"""Short messages for errors in configurations: the key, its line, what was expected, and the nearest name."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from pydoc import locate
from typing import Any

import yaml

from flsv.utilities.errors import ConfigurationError, nearest, similar_names

_UNKNOWN_OPTION = re.compile(r"does not accept option '(?P<key>[^']+)'")
_UNRECOGNIZED_WORDS = re.compile(r"unrecognized arguments: (?P<words>.+)")
_KEY_IN_MESSAGE = re.compile(r'Parser key "([^"]+)":')
#: Key of a configuration that the command line holds as text.
_KEY_OF_TEXT = "config"
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (?P<name>.+)")
_NOT_IN_MODULE = re.compile(
    r"(?:module '|No )(?P<module>[\w.]+)(?:' has no attribute '| attribute )(?P<name>\w+)"
)
_UNKNOWN_ARGUMENT = re.compile(r"Option '(?P<name>[\w.]+)' is not accepted")
_CLASS_PATH = re.compile(r"class_path(?:=| )'(?P<path>[\w.]+)'")
_MISSING_MODULE = re.compile(
    r"given class_path '(?P<path>[\w.]+)':\s+No module named '(?P<name>[\w.]+)'"
)
_GIVEN_VALUE = re.compile(r"Given value: (?P<value>.*?)(?:\. Got value: .*)?$", flags=re.MULTILINE)
_PART_OF_VALUE = re.compile(r"NestedArg\(key=\S+ val=(.*)\)")
_NO_MAPPING = re.compile(r'Unable to load config "(?P<value>.*)"')
_MAPPING_EXPECTED = "Expected a <class 'dict'>"
_EXPECTED_TYPE = re.compile(r"Expected an? <class '(?P<type>[\w.]+)'>")
#: What jsonargparse says in one line if a value may have one type alone.
_TYPE_AND_VALUE = re.compile(r"(?P<type>Expected an? <class '[\w.]+'>)\. Got value: (?P<value>.*)")
_EXPECTED_CHOICES = re.compile(r"Expected a typing\.Literal\[(?P<choices>.+)\]")
_SUBCLASS_EXPECTED = re.compile(r"Not a valid subclass of (?P<name>\w+)")
#: Types that a configuration may have, in words.
_TYPES_IN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "dict": "a mapping",
    "collections.abc.Sequence": "a list",
}
_PERCENTAGE = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?%")
#: An argument and its value, as errors of constructors show them.
_ARGUMENT_IN_MESSAGE = re.compile(
    r"\b(?P<name>\w+)=(?:'(?P<text>[^']*)'|(?P<number>[-+.\w]+)|[\[({])"
)
_QUOTED_TEXT = re.compile(r"'([^']+)'")


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
        # Without them an error of another process could not be unpickled, which sets them afterwards.
        options: Collection[str] = (),
        class_names: Collection[str] = (),
    ) -> None:
        super().__init__(message)
        self.options = options
        self.class_names = class_names


def explain(error: OptionError, files: Sequence[Path], words: Sequence[str] = ()) -> str:
    """Return a short message for an error of jsonargparse in one of some files, or in the words of a command line.

    Example:
        >>> said = "Subcommand 'fit' does not accept option 'federation.local_epoch'"
        >>> explain(OptionError(said, ["federation.local_epochs"], []), files=[])
        'federation.local_epoch: there is no such option. Did you mean federation.local_epochs?'
    """
    message = _TYPE_AND_VALUE.sub(r"\g<type>\nGiven value: \g<value>", str(error))
    unrecognized = _UNRECOGNIZED_WORDS.search(message)
    if unrecognized is not None:
        return _explain_words(unrecognized["words"].split(), error.options)

    unknown_option = _UNKNOWN_OPTION.search(message)
    if unknown_option is not None:
        key, explanation = _explain_option(unknown_option["key"], error.options)
        _, _, wrong_word = key.rpartition(".")
    else:
        keys, reasons_of_value = _innermost(message)
        if not keys:
            return message
        key = ".".join(keys)
        wrong_word, explanation = _explain_value(message, reasons_of_value, error.class_names)

    origin = ""
    if not _is_among(words, key):
        origin = _origin(files, key.split("."), wrong_word)
    return f"{origin}{key}: {explanation}"


def _explain_words(words: Sequence[str], options: Collection[str]) -> str:
    """Explain the first of the words of a command line that no option takes."""
    first_word = words[0]
    if not first_word.startswith("-"):
        return (
            f"{first_word}: expected an option. Name a configuration file by --config {first_word}."
        )
    option, _, _value = first_word.partition("=")
    key, explanation = _explain_option(option.lstrip("-"), options, dashes="--")
    return f"--{key}: {explanation}"


def _innermost(message: str) -> tuple[list[str], str]:
    """Return the keys to the wrong part of a value, and its message."""
    lines = message.splitlines()
    keys: list[str] = []
    last_line = 0
    last_indent = -1
    for number, line in enumerate(lines):
        keys_of_line = _KEY_IN_MESSAGE.findall(line)
        if not keys_of_line:
            continue
        indent = len(line) - len(line.lstrip())
        if indent <= last_indent:
            break  # it is said of another type that the value may have
        keys += [key for key in keys_of_line if key != ".".join(keys)]  # some are said twice
        last_line = number
        last_indent = indent

    _, _, end_of_line = lines[last_line].rpartition('":')
    text = "\n".join([end_of_line, *lines[last_line + 1 :]])
    text_before_value, heading, text_after = text.partition("Given value type")
    given_value = _GIVEN_VALUE.search(text_after)
    if given_value is not None:
        text_after = text_after[: given_value.end()]
    if keys[:1] == [_KEY_OF_TEXT]:
        keys = keys[1:]
    return keys, f"{text_before_value}{heading}{text_after}"


def _is_among(words: Sequence[str], key: str) -> bool:
    """Return whether a command line sets a key, or a part of it."""
    for word in words:
        option, _, _value = word.partition("=")
        option_key = option.removeprefix("--").replace("init_args.", "")
        is_option = option.startswith("--") and option != "--config"
        shorter, longer = sorted([option_key, key], key=len)
        if is_option and f"{longer}.".startswith(f"{shorter}."):
            return True
    return False


def _explain_option(key: str, options: Collection[str], dashes: str = "") -> tuple[str, str]:
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
        for name in similar_names(unknown_name, names_in_section):
            suggestions.append(f"{section}.{name}".lstrip("."))
    suggested_options = [f"{dashes}{suggestion}" for suggestion in suggestions]
    return unknown_key, f"there is no such option.{_question(suggested_options)}"


def _prefixes(key: str) -> Iterator[str]:
    """Yield ``a``, ``a.b`` and ``a.b.c`` for the key ``a.b.c``."""
    return accumulate(key.split("."), "{}.{}".format)


def _explain_value(message: str, text: str, class_names: Collection[str]) -> tuple[str, str]:
    """Return the wrong word in a value, and what is wrong with it, by the ``message`` and its part ``text``."""
    not_in_module = _NOT_IN_MODULE.search(message)
    if not_in_module is not None:
        name, module = not_in_module["name"], not_in_module["module"]
        names_of_module = dir(sys.modules[module]) if module in sys.modules else ()
        similar = similar_names(name, names_of_module)
        return name, f"module {module} has no {name}.{_question(similar)}"

    unknown_argument = _UNKNOWN_ARGUMENT.search(text)
    if unknown_argument is not None:
        paths = _CLASS_PATH.findall(text)
        name, _, _name_within = unknown_argument["name"].partition(".")
        return _explain_argument(name, paths[-1])

    missing_module = _MISSING_MODULE.search(text)
    if missing_module is not None:
        path, name = missing_module["path"], missing_module["name"]
        modules = [file.stem for file in Path.cwd().glob("*.py")]
        question = nearest(name, modules)
        return path, (
            f"{path} cannot be imported: there is no module {name}, neither in this folder nor installed.{question}"
        )

    no_mapping = _NO_MAPPING.search(text)
    if no_mapping is not None:
        value = no_mapping["value"]
        return value, f"expected a mapping, or a file that holds it, got {value}."

    expected = _expected(text)
    unknown_class = _UNKNOWN_CLASS.search(text)
    if unknown_class is not None and not expected:
        name = unknown_class["name"]
        similar = similar_names(name, class_names)
        advice = "A class of your own is named with its module."
        return name, f"there is no class {name}.{_question(similar)} {advice}"
    return _explain_type(text, expected)


def _explain_argument(name: str, path: str) -> tuple[str, str]:
    """Return a class's unknown argument, and the arguments that it has."""
    named_class: Any = locate(path)
    arguments = []
    if isinstance(named_class, type):
        arguments = [*inspect.signature(named_class).parameters]
    similar = similar_names(name, arguments) or arguments
    return name, f"{path} has no argument {name}.{_question(similar)}"


def _explain_type(text: str, expected: Sequence[str]) -> tuple[str, str]:
    """Return a value of the wrong type, and what was expected in its place."""
    value = ""
    given_value = _GIVEN_VALUE.search(text)
    if given_value is not None:
        part_of_value = _PART_OF_VALUE.fullmatch(given_value["value"])
        value = given_value["value"] if part_of_value is None else part_of_value[1]

    if _expects_mapping_of_names(text):
        reasons = (
            "expected a mapping from names of your choice to what they stand for, such as "
            "{my_metric: ClassSpecificShapley}"
        )
    elif expected:
        reasons = f"expected {' or '.join(expected)}"
    else:
        reasons = "; ".join(_reasons(text))
    explanation = f"{reasons}, got {_shortened(value)}" if value else reasons

    percentage = _PERCENTAGE.fullmatch(value)
    if percentage is not None and "a number" in expected:
        share = float(percentage["number"]) / 100
        explanation += f". Write {share:g} for {value}"
    explanation += "."
    for choices in _EXPECTED_CHOICES.findall(text):
        explanation += nearest(value, _QUOTED_TEXT.findall(choices))
    return value, explanation


def _expects_mapping_of_names(text: str) -> bool:
    return [*_reasons(text)] == [_MAPPING_EXPECTED]


def _expected(text: str) -> list[str]:
    """Return the permitted types and choices in words, without classes made by name."""
    expected = []
    for reason in _reasons(text):
        expected_type = _EXPECTED_TYPE.fullmatch(reason)
        expected_choices = _EXPECTED_CHOICES.fullmatch(reason)
        subclass = _SUBCLASS_EXPECTED.match(reason)
        if expected_type is not None:
            name = expected_type["type"]
            expected.append(_TYPES_IN_WORDS.get(name, f"a {name}"))
        elif expected_choices is not None:
            choices = _QUOTED_TEXT.findall(expected_choices["choices"])
            expected.append(f"one of {', '.join(choices)}")
        elif subclass is not None:
            expected.append(f"the name of a {subclass['name']}, or a mapping with its class_path")
    if "a number" in expected and "a whole number" in expected:
        expected.remove("a whole number")
    is_of_unknown_class = _UNKNOWN_CLASS.search(text) is not None
    if is_of_unknown_class and expected == ["a list"]:
        # A list of such objects is expected, and the value is one. Its class is the error.
        return []
    return [*dict.fromkeys(expected)]


def _reasons(text: str) -> Iterator[str]:
    """Yield what jsonargparse expected, without that nothing would do as well."""
    # For example
    #   Does not validate against any of the Union subtypes
    #   Subtypes: [<class 'int'>, <class 'NoneType'>]
    #   Errors:
    #     - Expected a <class 'int'>
    #     - Expected a <class 'NoneType'>
    #   Given value type: <class 'str'>
    # Without a union there is only the text of one error.
    text_before_value, _, _value = text.partition("Given value")
    # The text after the last "Errors:", or all text if it is not there.
    _, _, errors = text_before_value.rpartition("Errors:")
    for line in (errors or text_before_value).splitlines():
        reason = line.strip(" -")
        is_heading = reason.startswith(("Does not validate", "Subtypes"))
        if reason and not reason.endswith("<class 'NoneType'>") and not is_heading:
            yield reason


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
            key_mark = None  # the word is somewhere in what has been reached
            break
        key_node, node = entry
        key_mark = key_node.start_mark
    for descendant in _scalars(node):
        if descendant.value == word or descendant.value.endswith(f".{word}"):
            return int(descendant.start_mark.line) + 1
    if key_mark is None:
        return None
    return int(key_mark.line) + 1


def _entry_of_mapping(node: Any, key: str) -> tuple[yaml.Node, yaml.Node] | None:
    """Return the nodes of a key and of its value in a mapping, or in its ``init_args``, or None."""
    if not isinstance(node, yaml.MappingNode):
        return None
    for key_node, value_node in node.value:
        if key_node.value == key:
            return key_node, value_node
    for key_node, value_node in node.value:
        if key_node.value == "init_args":
            return _entry_of_mapping(value_node, key)
    return None


def origin_of(message: str, files: Sequence[Path]) -> str:
    """Return the file and line of the argument or text that a message is about, if it stands in one line, or ""."""
    if any(message.startswith(str(path)) for path in files):
        return ""
    roots = {path: yaml.compose(path.read_text("utf-8")) for path in files}
    # Each function searches a file for lines that the message may mean. The first counts whose only result is one line.
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
    """Yield the lines of entries with the name and the value of the message."""
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
