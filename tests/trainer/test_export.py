"""`python -m trainer.export`: a directory that transformers, or peft, loads, and the weights that were trained."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import tiny_models
from trainer.config import LoraConfig, OptimConfig
from trainer.export import main
from trainer.storage import checkpoint
from trainer.storage.checkpoint import TrainerState
from trainer.storage.digests import weights_digest
from trainer.weights.adapter import inject
from trainer.weights.optimizer import MasterAdamW

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
IDS = torch.arange(30)[None]


def model_of(dtype: torch.dtype = torch.float32, arch: str = "qwen3") -> PreTrainedModel:
    return tiny_models.random_model(arch, vocab_size=tiny_models.TEXT_VOCAB, eos_token_id=tiny_models.EOS, dtype=dtype)


@torch.enable_grad()
def saved(folder: Path, dtype: torch.dtype = torch.float32, *, adapter: bool = True) -> Path:
    """A run's folder with a checkpoint after one step, beside its base."""
    model = model_of(dtype)
    base = tiny_models.save_directory(folder / "base", model)
    if adapter:
        inject(model, LoraConfig(rank=4), base=base)
    optimizer = MasterAdamW(model.named_parameters(), OptimConfig())
    for _ in range(3):
        model(input_ids=IDS).logits.float().square().mean().backward()
        optimizer.step(3e-2)
    state = TrainerState(1, {}, 1, contents={"model": weights_digest(base)})
    checkpoint.save_checkpoint(folder / "run", state, model, tiny_models.byte_tokenizer(), optimizer, 2)
    return folder / "run"


def export(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@DTYPES
def test_full_weights_are_copied(tmp_path: Path, dtype: torch.dtype) -> None:
    run = saved(tmp_path, dtype, adapter=False)
    assert export(run, tmp_path / "out") == 0
    source = run / "checkpoints/step-000001/model"
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == dtype


@torch.no_grad()
def test_an_adapter_is_copied_as_peft_loads_it(tmp_path: Path) -> None:
    run = saved(tmp_path)
    (tmp_path / "out").mkdir()  # an empty one may be there
    assert export(run / "checkpoints/step-000001", tmp_path / "out") == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    copied, first = (
        PeftModel.from_pretrained(model, folder)(input_ids=IDS).logits
        for model, folder in (
            (base, tmp_path / "out"),
            (AutoModelForCausalLM.from_pretrained(tmp_path / "base"), run / "checkpoints/step-000001/model"),
        )
    )
    assert torch.equal(copied, first)


def test_what_a_killed_export_left_is_in_nobody_s_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = saved(tmp_path, adapter=False)
    (tmp_path / ".writing-out").mkdir()
    (tmp_path / ".writing-out/model.safetensors").write_text("half")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    assert export(run, ".") == 0
    assert not (tmp_path / ".writing-out").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32


@DTYPES
@torch.no_grad()
def test_a_merged_adapter_is_added_in_fp32_and_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    """To W + (32 / 4) B A, worked out in fp64 from the files; what has no adapter keeps its bits."""
    run = saved(tmp_path, dtype)
    assert export(run, tmp_path / "out", "merge=true") == 0
    before, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    adapter = load_file(run / "checkpoints/step-000001/model/adapter_model.safetensors")
    assert merged.keys() == before.keys()
    adapted = 0
    for name, weight in before.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        assert merged[name].dtype == dtype
        if f"{stem}.lora_A.weight" not in adapter:
            assert torch.equal(merged[name], weight), name
            continue
        first, second = (adapter[f"{stem}.lora_{letter}.weight"].double() for letter in "AB")
        exact = weight.double() + 8.0 * second @ first
        nearest = (exact.to(dtype).double() - exact).abs()  # beside it, what fp32 sums leave
        assert ((merged[name].double() - exact).abs() <= nearest + 1e-6).all(), name
        adapted += 1
    assert adapted == 14
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab")["input_ids"]
    assert not list((tmp_path / "out").glob("adapter_*"))


@torch.no_grad()
def test_a_merged_model_says_what_the_adapter_said(tmp_path: Path) -> None:
    run = saved(tmp_path)
    base = (tmp_path / "base").rename(tmp_path / "moved")
    assert export(run, tmp_path / "out", "merge=true", f"base={base}") == 0
    merged, plain = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "moved"))
    expected = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), run / "checkpoints/step-000001/model"
    )(input_ids=IDS).logits
    assert (merged(input_ids=IDS).logits - expected).abs().max() < 1e-3
    assert (plain(input_ids=IDS).logits - expected).abs().max() > 0.1


Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say where from and where to"),
        (["RUN"], "say where from and where to"),
        (["RUN", "OUT", "more"], "say where from and where to"),
        (["RUN", "OUT", "merge=true", "merge=true"], "each option once"),
        (["RUN", "OUT", "merge=yes"], "merge=yes: say true or false"),
        (["RUN", "OUT", "base=x"], "base=x: is the directory"),
        (["RUN", "OUT", "merge=true", "base=nowhere"], "base=nowhere: "),
        (["RUN", "OUT", "merge=true", "base=OTHER"], "is not the model that the run began with"),
        (["nowhere", "OUT"], "nowhere: neither a checkpoint nor a run directory"),
        (["RUN", "FULL"], "FULL is there already"),
        (["RUN", "FILE"], "FILE is there already"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path).rename(tmp_path / "RUN")
    tiny_models.save_directory(tmp_path / "OTHER", tiny_models.random_model("qwen3", seed=3))
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL/mine").write_text("")
    (tmp_path / "FILE").write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert export(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = saved(tmp_path)
    (run / "checkpoints/step-000001/model/adapter_model.safetensors").write_bytes(b"")
    assert export(run, tmp_path / "out") == 2
    assert "is damaged: model/adapter_model.safetensors has 0 bytes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_full_weights_have_nothing_to_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(saved(tmp_path, adapter=False), tmp_path / "out", "merge=true") == 2
    assert "has no adapter, all of its weights were trained" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "base")  # nor is the base looked at
    assert export(tmp_path / "run", tmp_path / "out") == 0
