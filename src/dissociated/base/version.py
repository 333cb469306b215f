"""The version of this package: the metadata of its installation has it, and the build takes it from git's tag."""

from __future__ import annotations

from dissociated.base.once import once


@once
def package_version() -> str:
    """Return the version of the installed package; `0+unknown` if it is used without being installed."""
    from importlib.metadata import PackageNotFoundError, version  # Its import takes as long as ours.

    try:
        return version("dissociated")
    except PackageNotFoundError:
        return "0+unknown"
