"""A Griffe extension: the docstrings' reST roles, formulas and doctests, and the values of defaults, for mkdocstrings.

It needs what the site needs; the other hooks and their tests do without.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import griffe
from latex2mathml.converter import convert

_ROLE = re.compile(r":(class|func|meth|attr|mod|data|obj|exc):`~?([^`]+)`", flags=re.DOTALL)
_MATH = re.compile(r":math:`([^`]+)`", flags=re.DOTALL)
_DISPLAY = re.compile(r"^( *)\.\. math::[ ]*(.*(?:\n(?:\1 +.*|[ ]*))*)", flags=re.MULTILINE)
#: The class with whose arguments a constructor is shown.
_ARGUMENTS_OF = re.compile(r"with_arguments_of\((\w+)\.__init__\)")
#: A doctest under its own heading; with anything else in it, it stays an aside.
_EXAMPLE = re.compile(r"^( *)Examples?:(?=\n\s*>>>)", flags=re.MULTILINE)


def markdown(text: str) -> str:
    """Return a docstring with references, formulas and doctests as the site shows them.

    Example:
        >>> markdown("See :class:`flsv.Round`.")
        'See <autoref identifier="flsv.Round" optional><code>Round</code></autoref>.'
    """
    text = _DISPLAY.sub(lambda m: f"{m[1]}{_mathml(m[2], 'block')}\n\n", text)
    text = _MATH.sub(lambda m: _mathml(m[1], "inline"), text)
    text = _ROLE.sub(_reference, text)
    return _EXAMPLE.sub(r"\1Examples:", text)


def _mathml(formula: str, display: str) -> str:
    # Hardly a font has the sign that latex2mathml takes for a difference of sets.
    return convert(" ".join(formula.split()).replace(r"\setminus", r"\backslash"), display=display)


def _reference(match: re.Match[str]) -> str:
    target = " ".join(match[2].split())
    shown = target.rpartition(".")[2] if match[1] != "mod" else target
    return f'<autoref identifier="{target}" optional><code>{shown}</code></autoref>'


class Roles(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Show arguments that another class lists, and the values of defaults that a module calls by a name."""
        show_arguments(pkg)
        show_defaults(pkg)


def show_arguments(within: griffe.Module | griffe.Class) -> None:
    """Let constructors that pass all arguments on have those of the other constructor."""
    for member in within.members.values():
        if isinstance(member, griffe.Module | griffe.Class):
            show_arguments(member)
        if not isinstance(member, griffe.Function):
            continue
        for decorator in member.decorators:
            source = str(decorator.value)
            match = _ARGUMENTS_OF.fullmatch(source)
            if match is None:
                continue
            class_name = match[1]
            listing_class = member.module.members[class_name].final_target
            constructor = listing_class.members["__init__"]
            member.parameters = constructor.parameters


def show_defaults(within: griffe.Module | griffe.Class) -> None:
    """Put a constant's value in the place of its name, in the signatures of everything within."""
    for member in within.members.values():
        if isinstance(member, griffe.Module | griffe.Class):
            show_defaults(member)
        for parameter in member.parameters if isinstance(member, griffe.Function) else ():
            named = member.module.members.get(str(parameter.default))
            with suppress(griffe.AliasResolutionError):  # of another package
                named = named.final_target if isinstance(named, griffe.Alias) else named
            if isinstance(named, griffe.Attribute) and named.value is not None:
                parameter.default = named.value
