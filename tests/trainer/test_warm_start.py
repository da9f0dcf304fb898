"""The cached warm start: made once, and made anew where it is spoiled or cannot be kept."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from caches import cache_with_kernels
from rollout.manifest import find_damage
from rollout.model.builtin import warm_started_directory
from rollout.model.loading import load_model
from trainer.config import ArithmeticConfig, TinyModelConfig
from trainer.data.tasks import arithmetic
from trainer.weights.warm_start import warm_started_tiny

MADE = "warm start: 1 steps of imitation on worked examples"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    """An empty cache."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("COWROLL_CACHE", str(cache_with_kernels(tmp_path / "cache")))
    return tmp_path / "cache"


def _warm_start(seed: int = 0) -> Path:
    config = ArithmeticConfig(eval_rows=4)
    return warm_started_tiny(
        TinyModelConfig(warm_start_steps=1, warm_start_batch_size=2), config, arithmetic(config, 0), seed
    )


def _weights(directory: Path) -> list[torch.Tensor]:
    return [p.detach().clone() for p in load_model(directory).parameters()]


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Without the kernels' own word, which comes with their first use."""
    return [record.getMessage() for record in caplog.records if not record.name.startswith("rollout_kernels")]


def test_second_call_takes_what_the_first_left(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = _warm_start()
    assert made.parent == cache / "warm_start"
    assert find_damage(made) is None
    assert _warm_start() == made
    assert _said(caplog) == [MADE, f"model: taken from the cache, {made}"]
    assert list(made.parent.iterdir()) == [made]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage", [_cut, Path.unlink, lambda p: p.write_bytes(bytes(p.stat().st_size)), lambda p: p.write_text("")]
)
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json", "files.json"])
def test_spoiled_entry_is_made_anew_with_the_same_weights(
    cache: Path, caplog: pytest.LogCaptureFixture, file: str, damage: Callable[[Path], None]
) -> None:
    made = _warm_start()
    before = _weights(made)
    damage(made / file)
    caplog.clear()
    assert _warm_start() == made
    assert _said(caplog)[0].startswith(f"{made} in the cache is damaged: {file} ")
    assert _said(caplog)[1] == MADE
    assert find_damage(made) is None
    assert all(torch.equal(a, b) for a, b in zip(_weights(made), before, strict=True))
    assert list(made.parent.iterdir()) == [made]


def test_library_takes_no_spoiled_entry_for_its_default(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    older, newer = _warm_start(seed=0), _warm_start(seed=1)
    os.utime(older, (1, 1))
    assert warm_started_directory() == newer
    _cut(newer / "model.safetensors")
    assert warm_started_directory() == older
    assert f"{newer} in the cache is damaged and not used: model.safetensors" in caplog.text


def _below_a_file(cache: Path) -> None:
    cache.write_text("mine")


def _entries_are_a_file(cache: Path) -> None:
    cache.mkdir()
    (cache / "warm_start").write_text("mine")


def _dangling(cache: Path) -> None:
    cache.symlink_to(cache.parent / "nowhere/at all")


@pytest.mark.parametrize("spoil", [_below_a_file, _entries_are_a_file, _dangling])
def test_cache_that_cannot_be_written_is_done_without(
    cache: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    expected = _weights(_warm_start())
    shutil.rmtree(cache)
    spoil(cache)
    caplog.clear()
    made = _warm_start()
    # said before the work, not after it
    assert "since the cache cannot be written: [Errno" in _said(caplog)[0]
    assert _said(caplog)[1] == MADE
    assert cache not in made.parents
    assert all(torch.equal(a, b) for a, b in zip(_weights(made), expected, strict=True))
    shutil.rmtree(made)


def test_left_over_folders_of_killed_processes_are_in_nobodys_way(cache: Path) -> None:
    (cache / "warm_start/.writing-abc").mkdir(parents=True)
    (cache / "warm_start/.writing-abc/config.json").write_text("{")
    assert warm_started_directory() is None
    made = _warm_start()
    assert warm_started_directory() == made


def test_interrupted_warm_start_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.weights.warm_start.imitate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _warm_start()
    assert list((cache / "warm_start").iterdir()) == []
