"""Directories that are whole or known to be damaged: a list of their files, with sizes and digests, is kept in them.

Whoever writes one writes it under another name, adds the list, flushes all of it to the disk and renames it.
"""

import hashlib
import json
import os
from pathlib import Path

MANIFEST = "files.json"


def file_digest(path: Path) -> str:
    """SHA-256 of a file's contents, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path) -> None:
    """List the files that are in the directory now, those of its folders too."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    listed = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        for path in files
    }
    (directory / MANIFEST).write_text(json.dumps(listed, indent=2))


def find_damage(directory: Path) -> str | None:
    """What is wrong with a directory that has a list of its files, by name of the file; None if all is as written.

    Sizes are compared before anything is read. Files that are not listed may be there, but no weights.
    """
    try:
        listed = json.loads((directory / MANIFEST).read_text())
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in listed.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if not expected:
        return f"{MANIFEST} lists nothing"
    for name, (size, _) in expected.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, and {size} were written"
    weights = {path.relative_to(directory).as_posix() for path in directory.rglob("*.safetensors")}
    if weights - expected.keys():
        return f"{min(weights - expected.keys())} was not written with it"
    for name, (_, digest) in expected.items():
        try:
            if file_digest(directory / name) != digest:
                return f"{name} has other contents than were written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def flush(directory: Path) -> None:
    """Have the disk hold a directory and everything in it."""
    for path in [*directory.rglob("*"), directory]:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            flush_directory(path)


def flush_directory(directory: Path) -> None:
    """Have the disk hold a directory's names, after something in it was made, renamed or removed."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
