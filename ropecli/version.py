"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("ropecli")
except PackageNotFoundError:  # run from a source tree that is not installed
    VERSION = "0+source"
