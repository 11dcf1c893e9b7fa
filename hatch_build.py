"""What a build adds: the package index's description with the project's links, and the commit of a checkout.

The description is README.md with links that lead somewhere from there. A link in README.md is relative to the
repository, which an index does not have. It becomes absolute, at the version's tag, below ``[project.urls]
Repository`` of pyproject.toml. While there is none, links become words, and pictures go. The other links follow from
this one address.
"""

from __future__ import annotations

import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|mailto:|#)([^)\s]+)\)")


def description(readme: str, repository: str | None, version: str) -> str:
    """README.md as an index shows it.

    Example:
        >>> description("![A plot](a.png) See [the guide](docs/a.md#b) and [PyPI](https://pypi.org).", None, "1.0")
        'See the guide and [PyPI](https://pypi.org).'
        >>> description("[Guide](docs/a.md)", "https://example.org/flsv/", "1.0")
        '[Guide](https://example.org/flsv/blob/v1.0/docs/a.md)'
    """

    def elsewhere(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        if repository:
            kind = "raw" if picture else "blob"
            return f"{picture}[{text}]({repository.rstrip('/')}/{kind}/v{version}/{path})"
        return "" if picture else text

    return _LINK.sub(elsewhere, readme).strip()


def project_links(repository: str, version: str) -> dict[str, str]:
    """Return the links beside the repository's on an index.

    Example:
        >>> project_links("https://example.org/flsv", "1.0")["Changelog"]
        'https://example.org/flsv/blob/v1.0/CHANGELOG.md'
    """
    root = repository.rstrip("/")
    return {
        "Documentation": f"{root}/blob/v{version}/docs/index.md",
        "Changelog": f"{root}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{root}/issues",
    }


class Description(MetadataHookInterface):
    """``readme`` of the project's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        version = re.search(
            r'^__version__ = "(.+)"$',
            (root / "flsv" / "__about__.py").read_text(),
            flags=re.MULTILINE,
        )
        if version is None:
            raise ValueError(
                'flsv/__about__.py has no line __version__ = "...": links lead to its tag.'
            )
        links = metadata.get("urls", {})
        repository = links.get("Repository")
        if repository:
            metadata["urls"] = {**project_links(repository, version[1]), **links}
        text = description((root / "README.md").read_text(encoding="utf-8"), repository, version[1])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class Commit(BuildHookInterface):
    """``flsv/commit.txt`` of a wheel or an sdist, by which the code knows its commit where there is no repository.

    An editable install has none: it finds the commit that is checked out. An sdist has the file already.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        about = runpy.run_path(str(Path(self.root) / "flsv" / "__about__.py"))
        commit_file = about["COMMIT_FILE"]
        commit = about["commit_of_code"]()
        if not commit or commit_file.exists():
            return
        self.folder = tempfile.TemporaryDirectory()
        written_file = Path(self.folder.name) / commit_file.name
        written_file.write_text(commit + "\n", encoding="utf-8")
        build_data["force_include"][str(written_file)] = f"flsv/{commit_file.name}"
