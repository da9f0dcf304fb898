"""The command line as it was typed: Hydra takes 1e3 for a number where a name was meant, and the last of two values."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from trainer.config import ConfigError, text_keys
from trainer.config.schema import OPTIONS, default_option, every_key, options_with

_OWN_KEYS = ("name", "run_dir", "resume")


def as_typed(arguments: Sequence[str]) -> list[str]:
    """The arguments, with quotes round numbers and truth values for text keys.

    `++` goes before keys that may be any, and before those that only another option has: parse_config says which.

    Raises ConfigError if a key or a group is given twice, alone or inside a mapping, or deleted. What Hydra cannot read
    is left to it.
    """
    text, free = text_keys(), {key for key, kind in every_key() if get_origin(kind) is dict}
    overrides = [_parsed(argument) for argument in arguments]
    chosen = {o.key_or_group: str(o.value()) for o in overrides if o is not None and o.key_or_group in OPTIONS}
    given, typed = dict[str, str](), []
    for argument, override in zip(arguments, overrides, strict=True):
        if override is not None:
            key = override.key_or_group
            value = None if override.is_sweep_override() else override.value()
            inside = list(_leaves(key, value))
            for leaf in inside:
                if leaf in given:
                    raise ConfigError(f"{leaf}: is given twice, as {given[leaf]!r} and as {argument!r}; give it once")
            given |= dict.fromkeys(inside, argument)
            if override.is_delete() and not key.startswith("hydra"):
                raise ConfigError(f"{key}: cannot be left out, as {argument!r} asks; give it a value")
            if not argument.startswith("+") and any(_needs_adding(leaf, free, chosen) for leaf in inside):
                argument = f"++{argument}"
            if key in text and isinstance(value, bool | int | float):
                before, _, written = argument.partition("=")
                argument = f"{before}={_quoted(written.strip())}"
        typed.append(argument)
    return typed


def _needs_adding(key: str, free: set[str], chosen: Mapping[str, str]) -> bool:
    """Whether Hydra would refuse a key, for not being in conf/, that may be any or that another option has."""
    group, _, name = key.partition(".")
    owners = options_with(group, name)
    if owners:
        kind = chosen.get(group, "")
        kind = kind if kind in OPTIONS[group] else default_option(group)
        if kind not in owners:
            return True
    return key.startswith(tuple(f"{open_key}." for open_key in free))


def _leaves(key: str, value: Any) -> Iterator[str]:
    """The key, or the full names of what a mapping that is given to it holds."""
    if not isinstance(value, dict) or not value:
        yield key
        return
    for name, inner in value.items():
        yield from _leaves(f"{key}.{name}", inner)


def command_line(arguments: Sequence[str], **values: str | None) -> str:
    """`python -m trainer` with the arguments and other values for name, run_dir and resume, to be pasted in a shell."""
    kept = []
    for argument in arguments:
        override = _parsed(argument)
        if override is None or override.key_or_group not in _OWN_KEYS:
            kept.append(argument)
    kept += [override_of(key, value) for key, value in values.items() if value is not None]
    return f"python -m trainer {shlex.join(kept)}"


def override_of(key: str, value: str) -> str:
    """An override by which Hydra gives the key this very text."""
    plain = f"{key}={value}"
    override = _parsed(plain)
    if override is not None and "${" not in value and override.value() == value:
        return plain
    return f"{key}={_quoted(value)}"


def _quoted(value: str) -> str:
    # a backslash keeps "${" from being an interpolation, and backslashes before it have to be doubled
    parts = value.split("${")
    for i, part in enumerate(parts[:-1]):
        backslashes = len(part) - len(part.rstrip("\\"))
        parts[i] = part + "\\" * (backslashes + 1)
    return QuotedString("${".join(parts), Quote.double).with_quotes()


def _parsed(argument: str) -> Override | None:
    """The override that Hydra reads; None for an option or what it cannot read."""
    if argument.startswith("-"):
        return None
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        return None
