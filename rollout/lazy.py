"""Packages whose names are imported when they are first asked for, so that a part of one can come without torch."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def importer(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """The package's `__getattr__`. homes: the names that it exports, by the module that each lives in."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home_of[name]), name)

    return find
