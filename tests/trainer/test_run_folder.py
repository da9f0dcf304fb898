"""A run's folder belongs to one living process, and is found unusable before any work."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import ConfigError
from trainer.storage import folders
from trainer.storage.lines import StepFile
from trainer.storage.run_folder import RunFolder

HOLDER = """
import os, subprocess, sys, time
from trainer.storage.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
child = {children}
print(child, flush=True)
time.sleep(600)
"""
FORK = "os.fork() or time.sleep(600)"
SPAWN = "subprocess.Popen(['sleep', '600'], close_fds=False).pid"


def _holder(folder: Path, children: str = "0") -> tuple[subprocess.Popen[str], int]:
    """A process that holds the folder, and the pid of its child."""
    code = HOLDER.format(children=children)
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize(
    "children",
    [
        pytest.param("0", id="alone", marks=pytest.mark.slow),
        pytest.param(FORK, id="forked"),
        pytest.param(SPAWN, id="spawned", marks=pytest.mark.slow),
    ],
)
def test_lock_is_held_by_the_living_and_not_by_the_dead_or_their_children(tmp_path: Path, children: str) -> None:
    process, child = _holder(tmp_path / "run", children)
    with process:
        try:
            with pytest.raises(ConfigError, match=rf"run_dir: .*run is in use by process {process.pid} on "):
                RunFolder(str(tmp_path / "run"))
        finally:
            process.kill()
            process.wait()
        RunFolder(str(tmp_path / "run")).close()
        if child:
            os.kill(child, signal.SIGKILL)


def test_lock_holds_within_a_process_too_and_close_gives_it_back(tmp_path: Path) -> None:
    first = RunFolder(str(tmp_path))
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        RunFolder(str(tmp_path))
    first.close()
    first.close()
    second = RunFolder(str(tmp_path))
    first.close()  # takes nothing from the second
    with pytest.raises(ConfigError, match="in use"):
        RunFolder(str(tmp_path))
    second.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("run_dir", "reason"),
    [
        ("file/run", "Not a directory"),
        ("file/a/b/run", "Not a directory"),
        ("file", "exists"),
        ("x" * 300, "File name too long"),
        ("new/" + "x" * 300, "File name too long"),
        ("/proc/run", "No such file"),
        ("/sys/run", ""),
        ("a\0b", "null"),
        ("~nosuchuser/run", "home directory"),
        ("dangling", "exists"),
    ],
)
def test_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_dir: str, reason: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    Path("dangling").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=rf"^run_dir: .* cannot be made and written to: .*{reason}"):
        RunFolder(run_dir)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "summary.json", ".lock"])
def test_folder_in_the_place_of_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=r"^run_dir: .*is a folder"):
        RunFolder(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_file_in_the_place_of_the_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ConfigError, match=r"^run_dir: .*checkpoints is a file"):
        RunFolder(str(tmp_path))


def test_only_what_was_made_and_stayed_empty_is_removed_again(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    RunFolder(str(tmp_path / "before/a/b")).close()
    assert list((tmp_path / "before").iterdir()) == []
    folder = RunFolder(str(tmp_path / "before/a/b"))
    (folder.path / "summary.json").write_text("")
    folder.close()
    assert [path.name for path in folder.path.iterdir()] == ["summary.json"]


def test_what_a_dead_process_left_half_done_is_finished(tmp_path: Path) -> None:
    root = folders.checkpoint_root(tmp_path)
    names = (".writing-000004", ".dropped-000001", ".replaced-000003", "step-000003", ".replaced-000002", ".mine")
    others = (".replaced-x", ".writing-mine", ".dropped-1", "step-best")
    for name in (*names, *others):
        (root / name).mkdir(parents=True)
        (root / name / "trainer.json").write_text(name)
    RunFolder(str(tmp_path)).close()
    left = {path.name: (path / "trainer.json").read_text() for path in root.iterdir()}
    kept = {name: name for name in ("step-000003", ".mine", *others)}
    assert left == kept | {"step-000002": ".replaced-000002"}


@pytest.mark.parametrize("name", [".writing-000004", ".replaced-000003", ".dropped-1000000"])
def test_file_in_the_place_of_half_a_checkpoint(tmp_path: Path, name: str) -> None:
    path = folders.checkpoint_root(tmp_path) / name
    path.parent.mkdir()
    path.write_text("mine")
    with pytest.raises(ConfigError, match=rf"^run_dir: {path} is no folder, .*; move it away$"):
        RunFolder(str(tmp_path))
    assert path.read_text() == "mine"
    path.with_name(".writing-x").write_text("mine")
    path.unlink()
    RunFolder(str(tmp_path)).close()
    assert [left.name for left in path.parent.iterdir()] == [".writing-x"]


def test_link_left_in_the_place_of_half_a_checkpoint_goes_alone(tmp_path: Path) -> None:
    root = folders.checkpoint_root(tmp_path)
    (root / "step-000003").mkdir(parents=True)
    (root / ".replaced-000003").symlink_to(root / "step-000003")
    RunFolder(str(tmp_path)).close()
    assert [path.name for path in root.iterdir()] == ["step-000003"]


def _lines(*steps: int, rest: str = "") -> str:
    return "".join(f'{{"step": {step}{rest}}}\n' for step in steps)


@pytest.mark.parametrize(
    ("metrics", "aside", "start", "begins", "kept"),
    [
        (_lines(0, 1, 2, 3), None, 2, (0, 1, 2, 3), _lines(0, 1, 2, 3)),  # step 3 was in no checkpoint
        (_lines(0, 1, 2), None, 2, (0, 1, 2), None),
        (_lines(0, 1, 2) + '{"step": 3, "rew', None, 2, (0, 1, 2), None),
        # went back to 2 of 6 and was killed at 4: step 6 is still there
        (_lines(0, 1, 2, 3, 4), _lines(0, 1, 2, 3, 4, 5, 6), 6, (0, 1, 2, 3, 4, 5, 6), _lines(0, 1, 2, 3, 4, 5, 6)),
        (_lines(0, 1, 2, 3, 4), _lines(0, 1, 2, 3, 4, 5, 6), 2, (0, 1, 2, 3, 4), _lines(0, 1, 2, 3, 4, 5, 6)),
    ],
)
def test_metrics_past_the_checkpoint_are_kept_aside(
    tmp_path: Path, metrics: str, aside: str | None, start: int, begins: tuple[int, ...], kept: str | None
) -> None:
    (tmp_path / "metrics.jsonl").write_text(metrics)
    path = tmp_path / folders.METRICS_ASIDE
    if aside is not None:
        path.write_text(aside)
    folder = RunFolder(str(tmp_path))
    folder.set_aside(tmp_path / f"checkpoints/step-{start:06d}", start)
    assert (tmp_path / "metrics.jsonl").read_text().startswith(_lines(*begins))
    assert (path.read_text() if path.exists() else None) == kept
    folder.close()


COMPLETION = ', "completion": "55"'
"""What a line of completions.jsonl has besides its step; a step has two."""


def _folder_with(path: Path, aside: str, metrics: tuple[int, ...]) -> Path:
    path.mkdir(exist_ok=True)
    (path / f"metrics{aside}.jsonl").write_text(_lines(*metrics))
    doubled = sorted([*metrics[1:], *metrics[1:]])  # none at step 0
    (path / f"completions{aside}.jsonl").write_text(_lines(*doubled, rest=COMPLETION))
    return path


def _completion_steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_completions_go_where_metrics_go(tmp_path: Path) -> None:
    folder = RunFolder(str(_folder_with(tmp_path / "run", "", (0, 1, 2, 3))))
    lines, aside = folder.path / "completions.jsonl", folder.path / "completions.before-resume.jsonl"
    folder.set_aside(folder.path / "checkpoints/step-000002", 2)
    StepFile(lines, 2).append({"step": 3, "completion": "another"})
    StepFile(folder.path / "metrics.jsonl", 2).append({"step": 3})
    assert (_completion_steps(lines), _completion_steps(aside)) == ([1, 1, 2, 2, 3], [1, 1, 2, 2, 3, 3])
    # killed, and a later checkpoint is there after all: back to what led to it
    (folder.path / "metrics.jsonl").write_text(_lines(0, 1, 2))
    folder.set_aside(folder.path / "checkpoints/step-000003", 3)
    assert lines.read_text() == aside.read_text()
    folder.drop_completions_aside()
    folder.drop_completions_aside()
    assert not aside.exists()
    folder.close()


def test_another_runs_checkpoint_brings_its_completions_or_none(tmp_path: Path) -> None:
    other = _folder_with(tmp_path / "other", "", (0, 1, 2, 3))
    folder = RunFolder(str(tmp_path / "run"))
    folder.set_aside(other / "checkpoints/step-000002", 2)
    assert _completion_steps(folder.path / "completions.jsonl") == [1, 1, 2, 2, 3, 3]
    (other / "completions.jsonl").unlink()
    folder.set_aside(other / "checkpoints/step-000002", 2)
    assert not (folder.path / "completions.jsonl").exists()
    folder.close()


def test_starting_over_twice_keeps_both_earlier_files(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    for steps in ((0, 1, 2), (0, 1)):
        _folder_with(tmp_path, "", steps)
        folder.set_aside(None, 0)
    folder.close()
    names = ("metrics.before-restart.jsonl", "metrics.before-restart-2.jsonl")
    assert [(tmp_path / name).read_text() for name in names] == [_lines(0, 1, 2), _lines(0, 1)]
    kept = [tmp_path / f"completions.before-restart{ending}.jsonl" for ending in ("", "-2")]
    assert [_completion_steps(path) for path in kept] == [[1, 1, 2, 2], [1, 1]]


@pytest.mark.parametrize("damage", [b"{\n", b"\xff\xfe\n", b"[1]\n", b'{"reward": 1}\n'])
def test_damaged_metrics_are_named(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(damage)
    folder = RunFolder(str(tmp_path))
    with pytest.raises(ConfigError, match=r"^run_dir: .*metrics.jsonl is damaged"):
        folder.set_aside(tmp_path / "checkpoints/step-000001", 1)
    _folder_with(tmp_path, "", (0, 1))
    (tmp_path / "completions.jsonl").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"^run_dir: .*completions.jsonl is damaged"):
        folder.set_aside(tmp_path / "checkpoints/step-000001", 1)
    folder.close()
