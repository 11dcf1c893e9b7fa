"""The version that a run writes into its files."""

from importlib import metadata

import flsv
from flsv.utilities import formats
from flsv.utilities.formats import package_versions


def test_stored_version_is_that_of_the_code_also_in_a_checkout_that_is_not_installed(monkeypatch):
    installed = metadata.version

    def version_of_others(name):
        if name == "flsv":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(formats, "version", version_of_others)

    assert package_versions()["flsv"] == flsv.__version__
