"""A save that ends at any of its operations on the file system leaves a whole checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

AT_EVERY_OPERATION = """
import json, os, shutil, sys
from pathlib import Path
import torch
import tiny_models
from rollout.manifest import find_damage
from trainer.storage import checkpoint, folders
from trainer.config import OptimConfig
from trainer.weights.optimizer import MasterAdamW
from trainer.storage.run_folder import RunFolder

folder = Path(sys.argv[1])
torch.set_num_threads(1)
model, tokenizer = tiny_models.random_model("llama"), tiny_models.byte_tokenizer()
optimizer = MasterAdamW(model.named_parameters(), OptimConfig())

def save(run_dir, step, keep):
    checkpoint.save_checkpoint(run_dir, checkpoint.TrainerState(step, {}, 1), model, tokenizer, optimizer, keep)

for step in (2, 4, 6):
    save(folder / "first", step, 3)
(folder / "first" / folders.METRICS_ASIDE).write_text("")

def die_at(count):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if event in ("os.mkdir", "os.rename", "shutil.rmtree", "os.rmdir"):
            seen += 1
            if seen == count:
                os._exit(9)
    sys.addaudithook(hook)

def left_by(step, count):
    run_dir = folder / f"{step}-{count}"
    shutil.copytree(folder / "first", run_dir, copy_function=os.link)
    child = os.fork()
    if child == 0:
        die_at(count)
        save(run_dir, step, 2)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    RunFolder(str(run_dir)).close()
    found = folders.list_checkpoints(run_dir)
    damages = [damage for damage in map(find_damage, found) if damage]
    hidden = [path.name for path in run_dir.rglob(".*")]
    print(json.dumps([step, status, [int(path.name[5:]) for path in found], damages + hidden]), flush=True)
    shutil.rmtree(run_dir)
    return status

for step in (3, 4, 8):
    count = 1
    while left_by(step, count):
        count += 1
"""


def test_killed_at_every_operation_of_a_save_there_is_a_whole_checkpoint(tmp_path: Path) -> None:
    """2, 4 and 6 are there, and 2 are kept; the save is of a step between, of one again, and of the next."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", AT_EVERY_OPERATION, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert {len([end for end in ends if end[0] == step]) > 15 for step in (3, 4, 8)} == {True}
    for step, _, left, wrong in ends:
        assert wrong == []
        assert left == [2, 4, 6] or step in left
    assert [(step, left) for step, status, left, _ in ends if status == 0] == [(3, [2, 3]), (4, [2, 4]), (8, [6, 8])]
