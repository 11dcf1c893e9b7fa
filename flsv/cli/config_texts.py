"""YAML of configurations in which a text stays the same text, such as "-999" and "null".

jsonargparse takes a text of a file for one of the command line: it reads it as YAML whenever it checks, writes or
instantiates a configuration, so that the text "-999" becomes a number where a field takes both. Here such texts are
marked as soon as a file is read, and fields that take a text keep them.
"""

from __future__ import annotations

import types
from enum import Enum
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from jsonargparse import _typehints, get_loader, set_dumper, set_loader
from jsonargparse.typing import register_type

_adapt_typehints = _typehints.adapt_typehints
_read_yaml = get_loader("yaml")
# jsonargparse 4.53 has types for arguments without annotation, which are Any in earlier versions.
_accepts_any_value = getattr(_typehints, "accepts_any_value", lambda hint: hint is Any)
_UNIONS = (Union, types.UnionType)
#: Line breaks that are read as others unless they are escaped.
_ONLY_ESCAPED = "\x85\u2028\u2029"


class QuotedText(str):
    """A text of a configuration that YAML reads as something else unless it is in quotation marks."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """YAML dumper that puts each text in quotation marks that needs them."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    plain_text = str(text)
    style = None
    if any(line_break in text for line_break in _ONLY_ESCAPED):
        style = '"'
    elif _needs_quotes(plain_text):
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", plain_text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(QuotedText, _represent_text)
# Lightning's Timer has a member of an enumeration as default of an argument that is a text.
_Dumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))


def read_config(text: str) -> Any:
    """Read the YAML of a configuration.

    Example:
        >>> read_config("{number: 1, text: '1'}")
        {'number': 1, 'text': '1'}
    """
    config = _read_yaml(text)
    if isinstance(config, str):
        return config  # a word of the command line
    return _marked(config)


def write_config(config: Any) -> str:
    """Write a configuration as YAML. :func:`read_config` and PyYAML read each text as the same text.

    Example:
        >>> print(write_config({"number": 1, "texts": ["1", "1e3", "null", "word"]}), end="")
        number: 1
        texts:
        - '1'
        - '1e3'
        - 'null'
        - word
    """
    return yaml.dump(
        config,
        Dumper=_Dumper,
        default_flow_style=False,
        allow_unicode=True,
        sort_keys=False,
    )


def keep_texts() -> None:
    """Let the parsers of jsonargparse read and write YAML by this module, and keep texts."""
    set_loader("yaml", read_config, exceptions=(yaml.YAMLError,))
    set_dumper("yaml", write_config)
    register_type(QuotedText, serializer=QuotedText, fail_already_registered=False)
    _typehints.adapt_typehints = _adapt_except_texts  # type: ignore[assignment]  # has the same options


def _marked(value: Any) -> Any:
    """Return a configuration in which texts that need quotation marks are :class:`QuotedText`."""
    if isinstance(value, dict):
        return {name: _marked(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_marked(item) for item in value]
    if isinstance(value, str) and _needs_quotes(value):
        return QuotedText(value)
    return value


def _unmarked(value: Any) -> Any:
    """Return a configuration in which texts are plain again, for the objects that are built from it."""
    if isinstance(value, QuotedText):
        return str(value)
    if type(value) is list:
        return [_unmarked(item) for item in value]
    if type(value) is dict:
        return {name: _unmarked(item) for name, item in value.items()}
    return value


@cache
def _needs_quotes(text: str) -> bool:
    try:
        value = _read_yaml(text)
    except yaml.YAMLError:
        return False  # what is no YAML stays a text
    except (ValueError, TypeError):
        return True  # 0b_ begins as a number does, and ? as a mapping
    return value != text or _is_number(text)


def _is_number(text: str) -> bool:
    """Return whether jsonargparse reads a text as a number, as it does 08, which is none in YAML."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _adapt_except_texts(value: Any, hint: Any, **options: Any) -> Any:
    """Check, write or instantiate a value as jsonargparse does, but keep a text where the hint takes texts."""
    is_written = options.get("serialize", False)
    is_text = isinstance(value, QuotedText) or (is_written and isinstance(value, str))
    if is_text and takes_texts(hint) and _needs_quotes(str(value)):
        adapted = value
    elif isinstance(value, QuotedText):
        adapted = _adapt_text(value, hint, **options)
    else:
        adapted = _adapt_typehints(value, hint, **options)
    return _unmarked(adapted) if options.get("instantiate_classes") else adapted


def _adapt_text(text: QuotedText, hint: Any, **options: Any) -> Any:
    """Read a text for a hint that takes none, such as a number in quotation marks."""
    try:
        return _adapt_typehints(str(text), hint, **options)
    except (TypeError, ValueError):
        return _adapt_typehints(_read_yaml(str(text)), hint, **options)


def takes_texts(hint: Any) -> bool:
    """Return whether values of a type hint may be texts."""
    if hint in (str, QuotedText) or _accepts_any_value(hint):
        return True
    if get_origin(hint) is Annotated:
        return takes_texts(get_args(hint)[0])
    return get_origin(hint) in _UNIONS and any(map(takes_texts, get_args(hint)))
