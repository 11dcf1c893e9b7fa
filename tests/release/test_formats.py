"""The version that a run writes into its files."""

from importlib import metadata

import flsv
from flsv.utilities import formats
from flsv.utilities.formats import package_versions


def test_stored_version_is_that_of_the_code():
    """Not that of the metadata, which a checkout keeps from when it was installed."""
    assert package_versions()["flsv"] == flsv.__version__


def test_checkout_that_is_not_installed_has_a_version(monkeypatch):
    installed = metadata.version

    def version_of_others(name):
        if name == "flsv":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(formats, "version", version_of_others)

    assert package_versions()["flsv"] == flsv.__version__
