"""flsv new: a metric of your own, as a small package to start from.

    flsv new metric UpdateNorm
    flsv new metric UpdateNorm --out packages

The package is a folder with the class, a test by flsv.testing that passes as
it is, a configuration, a README and a pyproject.toml whose entry point gives
the class a name in every configuration once it is installed.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
from collections.abc import Sequence
from pathlib import Path

from flsv.__about__ import __version__
from flsv.cli.command import command_parser, display_path
from flsv.utilities.errors import ConfigurationError

#: ``{file of the package: template}``, where ``{module}`` stands for the package's name.
FILES = {
    "pyproject.toml": "pyproject.toml.jinja",
    "README.md": "README.md.jinja",
    "{module}.py": "metric.py.jinja",
    "test_{module}.py": "test.py.jinja",
    "{module}.yaml": "config.yaml.jinja",
}


def new(name: str, out: Path = Path()) -> Path:
    """Write a package with a new metric from templates. Return its folder.

    Example:
        >>> import tempfile
        >>> folder = new("UpdateNorm", Path(tempfile.mkdtemp()))
        >>> print(*sorted(path.name for path in folder.iterdir()))
        README.md pyproject.toml test_update_norm.py update_norm.py update_norm.yaml
    """
    import jinja2

    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    if (
        not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name)
        or keyword.iskeyword(module)
        or keyword.iskeyword(name)
    ):
        raise ConfigurationError(
            f"{name!r} is no name of a class: expected letters and digits, such as UpdateNorm."
        )
    folder = out / module
    if folder.exists():
        raise ConfigurationError(
            f"{folder} is there already: choose another name, or another place by --out."
        )
    if importlib.util.find_spec(module) is not None:
        raise ConfigurationError(
            f"{name}: there is a module {module} already, which it would hide. Choose another name."
        )
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("flsv.cli"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    variables = {"name": name, "module": module, "version": __version__}
    folder.mkdir(parents=True)
    for file, template in FILES.items():
        text = templates.get_template(template).render(variables)
        (folder / file.format(module=module)).write_text(text, encoding="utf-8")
    return folder


def main(args: Sequence[str], quiet: bool = False) -> None:
    """Run ``flsv new`` with the command-line arguments ``args``."""
    parser = command_parser("flsv new", __doc__)
    parser.add_argument("kind", metavar="metric", help="what to write")
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="name of the class, such as UpdateNorm"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where its folder goes. Default: here",
    )
    options = parser.parse_args(list(args))
    if options.kind != "metric" or options.name is None:
        raise ConfigurationError(
            f"flsv new {' '.join(args)}: expected a kind and a name: flsv new metric UpdateNorm."
        )
    folder = new(options.name, options.out)
    if not quiet:
        print(
            f"Written: {display_path(folder)}. Its README.md says how to test, install and use it."
        )
