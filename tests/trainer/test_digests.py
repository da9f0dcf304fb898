"""Digests of contents: what counts changes them, and what does not leaves them alone."""

import sys
from pathlib import Path

import pytest

from trainer.data.rows import Row
from trainer.rewards.loading import load_reward
from trainer.storage import digests

ROWS = [Row("a", "1", {"level": 1}), Row([{"role": "user", "content": "b"}], 2)]


@pytest.mark.parametrize(
    "other",
    [
        ROWS[::-1],
        ROWS[:1],
        [*ROWS, ROWS[0]],
        [Row("a", 1, {"level": 1}), ROWS[1]],
        [Row("a", "1", {"level": 1.0}), ROWS[1]],
        [Row("a", "1", {"Level": 1}), ROWS[1]],
        [Row("a ", "1", {"level": 1}), ROWS[1]],
        [ROWS[0], Row([{"role": "system", "content": "b"}], 2)],
    ],
)
def test_rows_that_differ(other: list[Row]) -> None:
    assert digests.rows_digest(other) != digests.rows_digest(ROWS)


def test_rows_that_are_the_same() -> None:
    """Where a row stands in which file, and how its prompt was rendered, is no part of the data."""
    again = [
        Row("a", "1", {"level": 1}, source="b.jsonl:7", prompt_ids=[4, 5]),
        Row([{"content": "b", "role": "user"}], 2),
    ]
    assert digests.rows_digest(again) == digests.rows_digest(ROWS)


def _sparse(path: Path, size: int, place: int | None = None) -> str:
    with path.open("wb") as file:
        file.truncate(size)
        if place is not None:
            file.seek(place)
            file.write(b"x")
    return digests.files_digest([path])


@pytest.mark.parametrize("place", [0, 2**20 - 1, 64 * 2**20, 300 * 2**20 - 1])
def test_large_file_is_looked_at_in_places(tmp_path: Path, place: int) -> None:
    size = 300 * 2**20
    before = _sparse(tmp_path / "model.safetensors", size)
    assert _sparse(tmp_path / "model.safetensors", size, place) != before
    assert _sparse(tmp_path / "model.safetensors", size - 1) != before
    assert _sparse(tmp_path / "model.safetensors", size, 2**20) == before


@pytest.mark.parametrize("place", [0, 2**20, 3 * 2**20 - 5, 5 * 2**20])
def test_smaller_file_is_read_whole(tmp_path: Path, place: int) -> None:
    size = 5 * 2**20 + 1
    assert _sparse(tmp_path / "a", size, place) != _sparse(tmp_path / "a", size)


BELOW_A = {"mine_a/__init__.py", "mine_a/rewards.py", "mine_a/deep/__init__.py", "mine_a/deep/parts.py"}
PACKAGE = {
    "mine_a/__init__.py": "",
    "mine_a/rewards.py": "import json\nimport numpy\nfrom mine_a.deep.parts import part\ndef f(completions): ...\n",
    "mine_a/deep/__init__.py": "",
    "mine_a/deep/parts.py": "from mine_b import other\ndef part(): ...\n",
    "mine_b.py": "def other(): ...\n",
    "lib/site-packages/installed_c.py": "x = 1\n",
    "mine_consts.py": "W = 1\n",
    "mine_late.py": "",
    "mine_table.py": "import mine_kept\nTABLE = {'f': mine_kept.g}\n",
    "mine_kept.py": "def g(): ...\n",
    "mine_unused.py": "",
    "rich.py": "from mine_consts import W\nfrom mine_table import TABLE\nimport mine_late as _\ndel _\n"
    "def f(completions):\n    import mine_late\n",
    "flat.py": "import installed_c\nimport mine_b as helper\ndef f(completions): ...\ndef g(completions): ...\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "lib/site-packages"))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith(("mine_", "installed_c"))]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("mine_a.rewards:f", BELOW_A),
        ("mine_a.rewards.f", BELOW_A),
        ("mine_a.deep.parts:part", BELOW_A - {"mine_a/rewards.py"}),
        ("rich.py:f", {"rich.py", "mine_consts.py", "mine_late.py", "mine_table.py", "mine_kept.py"}),
        ("flat.py:f", {"flat.py", "mine_b.py"}),
    ],
)
def test_reward_is_its_module_and_what_lies_beside(package: Path, path: str, inside: set[str]) -> None:
    full = f"{package}/{path}" if ".py:" in path else path
    load_reward(full)
    before = digests.reward_digest(full)
    for name in PACKAGE:
        with (package / name).open("a") as file:
            file.write("# changed\n")
        assert (digests.reward_digest(full) != before) == (name in inside), name
        (package / name).write_text(PACKAGE[name])
    assert digests.reward_digest(full) == before


def test_another_function_of_the_same_file_is_another_reward(package: Path) -> None:
    load_reward(f"{package}/flat.py:f")
    assert digests.reward_digest(f"{package}/flat.py:f") != digests.reward_digest(f"{package}/flat.py:g")


def test_another_reward_of_the_folder_is_no_part_of_it(package: Path) -> None:
    load_reward(f"{package}/flat.py:f")
    before = digests.reward_digest(f"{package}/flat.py:f")
    (package / "other.v2.py").write_text("def f(completions): ...\n")
    load_reward(f"{package}/other.v2.py:f")
    assert digests.reward_digest(f"{package}/flat.py:f") == before
