"""Checkpoints: complete or not there, loadable by transformers, and only for the run they belong to."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import tiny_models
from rollout.manifest import find_damage
from rollout.model.loading import load_model
from trainer.config import ConfigError, OptimConfig
from trainer.storage import checkpoint, folders
from trainer.storage.checkpoint import TrainerState
from trainer.storage.writing import WriteError
from trainer.weights.generation import keep_special_ids
from trainer.weights.optimizer import MasterAdamW

KEYS = {"optim.lr": 0.1, "sampling.stop_token_ids": [1, 2]}


def _step(model: PreTrainedModel) -> MasterAdamW:
    optimizer = MasterAdamW(model.named_parameters(), OptimConfig())
    model(input_ids=torch.arange(9)[None]).logits.float().square().mean().backward()
    optimizer.step(1e-2)
    return optimizer


def _stepped(arch: str, dtype: torch.dtype) -> tuple[PreTrainedModel, MasterAdamW]:
    model = tiny_models.random_model(arch, dtype=dtype)
    return model, _step(model)


def _save(run_dir: Path, step: int, model: PreTrainedModel, optimizer: MasterAdamW, keep: int = 2) -> Path:
    state = TrainerState(step, KEYS, 1)
    return checkpoint.save_checkpoint(run_dir, state, model, tiny_models.byte_tokenizer(), optimizer, keep)


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_the_model_with_equal_logits(tmp_path: Path, arch: str, dtype: torch.dtype) -> None:
    made = tiny_models.save_directory(tmp_path / "made", tiny_models.random_model(arch, dtype=dtype))
    model = load_model(made)
    saved = _save(tmp_path, 1, model, _step(model))
    loaded = AutoModelForCausalLM.from_pretrained(saved / "model", dtype=dtype)
    ids = torch.arange(40)[None]
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("arch", ["qwen3", "qwen2"])  # untied and tied embeddings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_state_come_back_into_the_same_tensors(tmp_path: Path, arch: str, dtype: torch.dtype) -> None:
    model, optimizer = _stepped(arch, dtype)
    saved = _save(tmp_path, 1, model, optimizer)
    other = tiny_models.random_model(arch, seed=5, dtype=dtype)
    addresses = [p.data_ptr() for p in other.parameters()]
    restored = MasterAdamW(other.named_parameters(), OptimConfig())
    checkpoint.load_checkpoint(saved, other, restored)
    assert [p.data_ptr() for p in other.parameters()] == addresses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    before, after = optimizer.state_tensors(), restored.state_tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_only_the_last_checkpoints_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    model, optimizer = _stepped("llama", torch.float32)
    for step in (2, 10, 100):
        _save(tmp_path, step, model, optimizer)
    assert [path.name for path in folders.list_checkpoints(tmp_path)] == ["step-000010", "step-000100"]
    found = checkpoint.find_checkpoint("auto", tmp_path)
    assert found == checkpoint.find_checkpoint(str(tmp_path), Path("elsewhere")) == tmp_path / "checkpoints/step-000100"
    assert checkpoint.find_checkpoint("auto", tmp_path / "new") is None
    with pytest.raises(ConfigError, match="resume"):
        checkpoint.find_checkpoint(str(tmp_path / "new"), tmp_path)


def test_a_crash_while_writing_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _stepped("llama", torch.float32)
    first = _save(tmp_path, 2, model, optimizer)

    def crash(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", crash)
        with pytest.raises(OSError, match="disk full"):
            _save(tmp_path, 4, model, optimizer)
    assert checkpoint.find_checkpoint("auto", tmp_path) == first
    _save(tmp_path, 4, model, optimizer)  # what the crash left behind is in nobody's way
    assert [path.name for path in folders.list_checkpoints(tmp_path)] == ["step-000002", "step-000004"]


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (KEYS | {"optim.lr": 0.2}, "optim.lr: the run began with 0.1"),
        (KEYS | {"sampling.stop_token_ids": [1]}, "sampling.stop_token_ids"),
        (KEYS | {"new": 1}, "new: the run began with None"),
    ],
)
def test_a_changed_key_is_named(tmp_path: Path, now: dict[str, Any], named: str) -> None:
    saved = _save(tmp_path, 1, *_stepped("llama", torch.float32))
    assert checkpoint.read_state(saved, KEYS) == TrainerState(1, KEYS, 1)
    with pytest.raises(ConfigError, match=named):
        checkpoint.read_state(saved, now)


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([0.1, 0.9, 0.5, 0.3], [2, 3, 4]),
        ([None, 0.2, None, None], [2, 3, 4]),
        ([None] * 4, [3, 4]),
        ([0.1, 0.2, 0.3, 0.9], [3, 4]),
        ([0.7, 0.7, 0.1, 0.2], [2, 3, 4]),  # the last of equals
    ],
)
def test_the_best_is_kept_beside_the_last(tmp_path: Path, scores: list[float | None], kept: list[int]) -> None:
    model, optimizer = _stepped("llama", torch.float32)
    for step, score in enumerate(scores, start=1):
        state = TrainerState(step, KEYS, 1, score=score)
        checkpoint.save_checkpoint(tmp_path, state, model, tiny_models.byte_tokenizer(), optimizer, keep=2)
    assert [path.name for path in folders.list_checkpoints(tmp_path)] == [f"step-{step:06d}" for step in kept]
    last = folders.list_checkpoints(tmp_path)[-1]
    assert checkpoint.read_state(last, KEYS).score == scores[-1]


def test_a_changed_key_that_may_is_told_and_no_other_slips_through(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, now = _save(tmp_path, 1, *_stepped("llama", torch.float32)), KEYS | {"optim.lr": 0.2}
    assert checkpoint.read_state(saved, now, ["optim.lr"]).step == 1
    assert "optim.lr: the run began with 0.1 and goes on with 0.2" in caplog.text
    with pytest.raises(ConfigError, match=r"^new: .*go on all the same with resume_changed=\[new\]$"):
        checkpoint.read_state(saved, now | {"new": 1}, ["optim.lr"])


def test_keys_of_options_that_were_not_chosen_hold_up_no_resume(tmp_path: Path) -> None:
    """Checkpoints had them once, when every option had all keys of its group."""
    saved = _save(tmp_path, 1, *_stepped("llama", torch.float32))
    state = json.loads((saved / "trainer.json").read_text())
    before = KEYS | {"model.kind": "tiny", "model.path": None, "task.path": None, "task.chat_template_kwargs": {}}
    (saved / "trainer.json").write_text(json.dumps(state | {"trajectory": before}))
    assert checkpoint.read_state(saved, KEYS | {"model.kind": "tiny"}).step == 1
    with pytest.raises(ConfigError, match=r"^model\.kind: the run began with 'tiny' and would go on with 'hf'"):
        checkpoint.read_state(saved, KEYS | {"model.kind": "hf"})


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    saved = _save(tmp_path, 1, *_stepped("llama", torch.float32))
    state = json.loads((saved / "trainer.json").read_text())
    (saved / "trainer.json").write_text(json.dumps(state | {"format_version": 99}))
    with pytest.raises(ConfigError, match="format_version 99"):
        checkpoint.read_state(saved, KEYS)


def test_contradictory_sampling_defaults_do_not_block_saving(tmp_path: Path) -> None:
    model, optimizer = _stepped("llama", torch.float32)
    model.generation_config.update(do_sample=False, temperature=0.9, top_p=0.6, eos_token_id=[7, 9])
    keep_special_ids(model)
    saved = _save(tmp_path, 1, model, optimizer)
    assert json.loads((saved / "model/generation_config.json").read_text())["eos_token_id"] == [7, 9]


# -- whose folders ------------------------------------------------------------------------------------------------

FOREIGN = [
    "step-best", "step-000004-backup", "step-000004.bak", "step-4", "step-0000004", "step-00004a", "step--00001",
    "step-٠٠٠٠٠٤", "Step-000009", "copy of step-000009", "step-000009 (1)", ".step-000009",
]  # fmt: skip


def test_folders_of_other_names_are_neither_checkpoints_nor_deleted(tmp_path: Path) -> None:
    made = _stepped("llama", torch.float32)
    first = _save(tmp_path, 4, *made)
    for name in FOREIGN:
        shutil.copytree(first, first.with_name(name))
    first.with_name("step-000099").write_text("a file")
    assert folders.list_checkpoints(tmp_path) == [first]
    second = _save(tmp_path, 6, *made, keep=1)
    assert checkpoint.find_checkpoint("auto", tmp_path) == second
    assert {path.name for path in second.parent.iterdir()} == {*FOREIGN, "step-000006", "step-000099"}
    assert all(find_damage(second.with_name(name)) is None for name in FOREIGN)
    assert checkpoint.find_checkpoint(str(second.with_name("step-best")), tmp_path) == second.with_name("step-best")


def test_steps_of_seven_digits_come_last(tmp_path: Path) -> None:
    made = _stepped("llama", torch.float32)
    for step in (999_999, 1_000_000):
        _save(tmp_path, step, *made)
    assert [path.name for path in folders.list_checkpoints(tmp_path)] == ["step-999999", "step-1000000"]


def test_a_link_is_dropped_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    made = _stepped("llama", torch.float32)
    elsewhere = _save(tmp_path, 2, *made).rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoints/step-000002").symlink_to(elsewhere)
    _save(tmp_path, 4, *made, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]
    assert find_damage(elsewhere) is None


def test_a_save_drops_later_steps_and_never_itself(tmp_path: Path) -> None:
    """A run that went back to step 2 of 8, with keep=2: what it saves is the newest, whatever the others' numbers."""
    made = _stepped("llama", torch.float32)
    for step in (2, 4, 6, 8):
        _save(tmp_path, step, *made, keep=9)
    _save(tmp_path, 3, *made, keep=2)
    assert [path.name for path in folders.list_checkpoints(tmp_path)] == ["step-000002", "step-000003"]


def test_a_step_saved_again_takes_the_first_one_s_place(tmp_path: Path) -> None:
    made = _stepped("llama", torch.float32)
    first = _save(tmp_path, 2, *made)
    (first / "trainer.json").write_text("{")
    assert find_damage(_save(tmp_path, 2, *made)) is None
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


# -- damage -------------------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _garbage(path: Path) -> None:
    path.write_bytes(bytes(reversed(path.read_bytes())))


def _one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


FILES = ["trainer.json", "optimizer.safetensors", "model/model.safetensors", "model/config.json"]
FILES += ["model/tokenizer.json", "model/generation_config.json"]
DAMAGES: list[Callable[[Path], object]] = [_cut, _zeroed, _garbage, _one_bit, Path.unlink, lambda p: p.write_text("")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(tmp_path_factory.mktemp("saved"), 4, *_stepped("qwen2", torch.bfloat16))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_any_damage_is_named_before_anything_is_loaded(
    tmp_path: Path, saved: Path, file: str, damage: Callable[[Path], None]
) -> None:
    copy = shutil.copytree(saved, tmp_path / "checkpoints/step-000004")
    checkpoint.check_whole(copy)
    damage(copy / file)
    with pytest.raises(
        ConfigError, match=rf"resume: {copy} .*(is damaged|format_version).*; move it away to start over"
    ):
        checkpoint.check_whole(copy)
    with pytest.raises(ConfigError, match=f"is damaged: {file} "):
        checkpoint.check_whole(copy)


@pytest.mark.parametrize(
    "contents", [None, "", "{}", "[]", "null", "{", '{"trainer.json": 3}', '{"a": {"bytes": "x"}}']
)
def test_a_damaged_list_of_files_is_named(tmp_path: Path, saved: Path, contents: str | None) -> None:
    copy = shutil.copytree(saved, tmp_path / "step-000004")
    if contents is None:
        (copy / "files.json").unlink()
    else:
        (copy / "files.json").write_text(contents)
    with pytest.raises(ConfigError, match=r"is damaged: files\.json "):
        checkpoint.check_whole(copy)


def test_weights_that_were_not_written_with_it_are_named(tmp_path: Path, saved: Path) -> None:
    copy = shutil.copytree(saved, tmp_path / "step-000004")
    (copy / "model/README.md").write_text("mine")
    checkpoint.check_whole(copy)
    shutil.copy(copy / "model/model.safetensors", copy / "model/more.safetensors")
    with pytest.raises(ConfigError, match=r"model/more\.safetensors was not written with it"):
        checkpoint.check_whole(copy)


GOOD = TrainerState(4, KEYS, 1).__dict__


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "4", '"text"', "\0\0\0", "NaN",
        *(json.dumps({k: v for k, v in GOOD.items() if k != name}) for name in GOOD),
        *(json.dumps(GOOD | {name: "4"}) for name in GOOD if name != "kernels"),
        *(json.dumps(GOOD | {"step": step}) for step in (None, True, 4.0, -4, 5, [4])),
        json.dumps(GOOD | {"trajectory": [["optim.lr", 0.1]]}), json.dumps(GOOD | {"more": 1}),
    ],
)  # fmt: skip
def test_a_damaged_state_is_named(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "step-000004"
    folder.mkdir()
    (folder / "trainer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^resume: .*step-000004 (is damaged: trainer\.json|has format_version)"):
        checkpoint.read_state(folder, KEYS)


def test_a_folder_without_its_state_is_passed_over_with_a_word_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = _stepped("llama", torch.float32)
    first, second = _save(tmp_path, 2, *made), _save(tmp_path, 4, *made)
    (second / "trainer.json").unlink()
    assert checkpoint.find_checkpoint("auto", tmp_path) == first
    assert "step-000004 has no trainer.json" in caplog.text
    _save(tmp_path, 3, *made, keep=1)  # what replaces it
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]
    (tmp_path / "checkpoints/step-000003/trainer.json").unlink()
    with pytest.raises(ConfigError, match=r"step-000003 has no trainer\.json.*remove it to start over"):
        checkpoint.find_checkpoint("auto", tmp_path)


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def _with(name: str, make: Callable[[dict[str, Tensor]], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, make(tensors).clone())


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
WEIGHTS = {
    "missing": _without(NORM),
    "extra": _with("model.more", lambda t: t[NORM]),
    "broadcasts": _with(NORM, lambda t: t[NORM][:1]),
    "broadcasts over rows": _with(EMBEDDING, lambda t: t[EMBEDDING][:1]),
    "scalar": _with(NORM, lambda t: t[NORM][0]),
    "flat": _with(EMBEDDING, lambda t: t[EMBEDDING].reshape(-1)),
    "another dtype": _with(NORM, lambda t: t[NORM].double()),
    "tied and different": _with("lm_head.weight", lambda t: t[EMBEDDING] * 1.5),
}
STATE: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "moment missing": _without(f"exp_avg/{NORM}"),
    "count missing": _without(f"step/{NORM}"),
    "master missing": _without(f"master/{NORM}"),
    "extra": _with("exp_avg/model.more", lambda t: t[f"exp_avg/{NORM}"]),
    "no name of ours": _with("nonsense", lambda t: t[f"exp_avg/{NORM}"]),
    "moment broadcasts": _with(f"exp_avg_sq/{NORM}", lambda t: t[f"exp_avg_sq/{NORM}"][:1]),
    "master broadcasts": _with(f"master/{NORM}", lambda t: t[f"master/{NORM}"][:1]),
    "master in bf16": _with(f"master/{NORM}", lambda t: t[f"master/{NORM}"].bfloat16()),
    "empty": dict.clear,
}
CHANGES = [("model/model.safetensors", change) for change in WEIGHTS] + [("optimizer.safetensors", c) for c in STATE]


@pytest.mark.parametrize(("file", "change"), CHANGES)
def test_other_tensors_than_the_model_s_are_refused_and_nothing_is_copied(
    tmp_path: Path, saved: Path, file: str, change: str
) -> None:
    copy = shutil.copytree(saved, tmp_path / "step-000004")
    tensors = load_file(copy / file)
    (WEIGHTS if file.startswith("model") else STATE)[change](tensors)
    save_file(tensors, copy / file)
    model, optimizer = _stepped("qwen2", torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in (model.state_dict() | optimizer.state_tensors()).items()}
    with pytest.raises(ConfigError, match=rf"^resume: .*{copy}/{file.split('/')[0]}"):
        checkpoint.load_checkpoint(copy, model, optimizer)
    with pytest.raises(ConfigError, match="is damaged"):
        checkpoint.check_whole(copy)
    after = model.state_dict() | optimizer.state_tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_tied_weights_under_both_names_load_if_they_agree(tmp_path: Path, saved: Path) -> None:
    copy = shutil.copytree(saved, tmp_path / "step-000004")
    tensors = load_file(copy / "model/model.safetensors")
    tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
    save_file(tensors, copy / "model/model.safetensors")
    model, optimizer = _stepped("qwen2", torch.bfloat16)
    checkpoint.load_checkpoint(copy, model, optimizer)
    assert torch.equal(model.get_input_embeddings().weight, tensors[EMBEDDING])


@pytest.mark.parametrize("file", ["model/model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", [_cut, _zeroed, Path.unlink])
def test_files_that_do_not_load_are_named(
    tmp_path: Path, saved: Path, file: str, damage: Callable[[Path], None]
) -> None:
    copy = shutil.copytree(saved, tmp_path / "step-000004")
    damage(copy / file)
    model, optimizer = _stepped("qwen2", torch.bfloat16)
    before = model.get_input_embeddings().weight.clone()
    with pytest.raises(ConfigError, match=rf"^resume: {copy}.*(damaged|no weights)"):
        checkpoint.load_checkpoint(copy, model, optimizer)
    assert torch.equal(model.get_input_embeddings().weight, before)


# -- a full disk --------------------------------------------------------------------------------------------------


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    """Writes past `size` bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "stopped_in", ["model/config.json", "model/model.safetensors", "model/tokenizer.json", "optimizer.safetensors"]
)
def test_a_full_disk_leaves_the_earlier_checkpoint_and_nothing_half_written(tmp_path: Path, stopped_in: str) -> None:
    made = _stepped("llama", torch.float32)
    first = _save(tmp_path, 1, *made)
    with (
        _largest_file((first / stopped_in).stat().st_size - 1),
        pytest.raises(WriteError, match=rf"^{tmp_path}/checkpoints/step-000002 could not be written: .*too large"),
    ):
        _save(tmp_path, 2, *made)
    assert list(first.parent.iterdir()) == [first]
    assert find_damage(first) is None
    _save(tmp_path, 2, *made)
    assert [path.name for path in folders.list_checkpoints(tmp_path)] == ["step-000001", "step-000002"]
