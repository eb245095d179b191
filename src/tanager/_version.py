"""The one place where the version is written."""

__version__ = "0.3.0.dev0"
