"""LoRA in the trainer: peft is the judge of what is saved, and nothing but the adapter moves."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from importlib import util
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import tiny_models
from rollout.forward import build_pack
from rollout.model.views import AttentionContext, raw_logits
from runs import configure, hf_overrides, metrics_of, run_once, write_rows
from trainer.config import AdapterConfig, ConfigError, LoraConfig, OptimConfig
from trainer.run import Run, prepare
from trainer.storage import checkpoint
from trainer.storage.checkpoint import TrainerState
from trainer.storage.digests import base_contents
from trainer.weights.adapter import check_adapter, inject
from trainer.weights.optimizer import MasterAdamW

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
LORA = ["adapter=lora", "adapter.rank=4", "adapter.alpha=8", "optim.lr=1e-2"]


def model_of(dtype: torch.dtype = torch.float32, arch: str = "qwen3") -> PreTrainedModel:
    return tiny_models.random_model(arch, vocab_size=tiny_models.TEXT_VOCAB, eos_token_id=tiny_models.EOS, dtype=dtype)


def overrides_of(folder: Path, model: PreTrainedModel, *more: str) -> list[str]:
    overrides = hf_overrides(folder, model, write_rows(folder / "rows.jsonl"))
    return [o for o in overrides if not o.startswith("optim.lr")] + LORA + list(more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps in fp32, with a KL term, saved at 2 and 3."""
    folder = tmp_path_factory.mktemp("trained")
    overrides = overrides_of(folder, model_of(), "checkpoint.every=2", "algorithm.kl_coef=0.1", "steps=3")
    return run_once(folder / "run", *overrides)


def adapter_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".lora_" in name}


# -- making one ---------------------------------------------------------------------------------------------------


@DTYPES
def test_a_fresh_adapter_changes_nothing_and_is_drawn_from_the_seed_alone(dtype: torch.dtype) -> None:
    base, first, second, other = (model_of(dtype) for _ in range(4))
    torch.manual_seed(1)
    inject(first, LoraConfig(), seed=7)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    inject(second, LoraConfig(), seed=7)
    inject(other, LoraConfig(), seed=8)
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())
    ids = torch.arange(20)[None]
    assert torch.equal(base(input_ids=ids).logits, first(input_ids=ids).logits)
    mine, again, others = adapter_of(first), adapter_of(second), adapter_of(other)
    assert {p.dtype for p in mine.values()} == {dtype}
    assert all(torch.equal(mine[name], again[name]) for name in mine)
    assert all(torch.equal(mine[name], others[name]) == ("lora_B" in name) for name in mine)


def test_all_linear_layers_but_the_head_have_one_and_nothing_else_is_trained() -> None:
    model = model_of()
    inject(model, LoraConfig(rank=4))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2
    assert all(".lora_" in name for name in trained)
    inner, kv, wide = 96, 64, 160  # q and o have 4 heads of 32
    sizes = [(inner, 128), (inner, kv), (inner, kv), (128, inner), (inner, wide), (inner, wide), (wide, inner)]
    count = 2 * sum(4 * (i + o) for i, o in sizes)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == count
    assert MasterAdamW.bytes_for(model.parameters()).moments == 8 * count


def test_named_layers_alone_have_one() -> None:
    model = model_of()
    inject(model, LoraConfig(target_modules=["q_proj", "down_proj"]))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in adapter_of(model)} == {"q_proj", "down_proj"}


def test_no_adapter_changes_nothing() -> None:
    model = model_of()
    inject(model, AdapterConfig())
    assert all(p.requires_grad for p in model.parameters())


# -- a run --------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.usefixtures("implementation")
def test_generator_and_trainer_agree_and_only_the_adapter_moves(tmp_path: Path, dtype: torch.dtype) -> None:
    model = model_of(dtype)
    run = prepare(configure(tmp_path / "run", *overrides_of(tmp_path, model, "algorithm.kl_coef=0.1", "steps=4")))
    before = adapter_of(run.engine.module)
    results = [run.trainer.step(i) for i in range(4)]
    run.close()
    assert [result.metrics["logprob_gap_max"] for result in results] == [0.0] * 4
    assert run.engine.numerics.exact
    assert results[0].metrics["kl"] == 0.0  # the reference is the same module, with the adapter off
    assert results[3].metrics["kl"] > 0.0
    assert all(result.metrics["grad_norm"] > 0.0 for result in results)
    now = dict(run.engine.module.named_parameters())
    for name, weight in model.named_parameters():
        stem, _, last = name.rpartition(".")
        kept = now[name] if name in now else now[f"{stem}.base_layer.{last}"]
        assert torch.equal(kept, weight), name
        assert not kept.requires_grad
    assert all(not torch.equal(before[name], after) for name, after in adapter_of(run.engine.module).items())


def test_the_reference_is_the_loaded_model(tmp_path: Path) -> None:
    """After the adapter has moved, log-probs of the reference are those of a plain copy of the base."""
    model = model_of()
    run = prepare(configure(tmp_path / "run", *overrides_of(tmp_path, model, "algorithm.kl_coef=0.1")))
    for i in range(2):
        run.trainer.step(i)
    tokens = run.trainer.prepare(run.trainer.collector.collect(2))
    run.close()
    assert tokens.ref_logprobs is not None
    expected = [
        tiny_models.eager_logprobs(model, group.prompt_ids, rollout.completion_ids)
        for group in tokens.groups for rollout in group.rollouts
    ]  # fmt: skip
    assert (tokens.ref_logprobs - torch.cat(expected)).abs().max() < tiny_models.LOGPROB_TOLERANCE
    assert (tokens.ref_logprobs - tokens.rollout_logprobs).abs().max() > 0.01


@DTYPES
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, dtype: torch.dtype) -> None:
    overrides = overrides_of(tmp_path, model_of(dtype, "qwen2"), "checkpoint.every=2", "algorithm.kl_coef=0.1")
    whole = run_once(tmp_path / "whole", *overrides, "steps=5")
    run_once(tmp_path / "cut", *overrides, "steps=3")
    shutil.rmtree(tmp_path / "cut/checkpoints/step-000003")
    resumed = run_once(tmp_path / "cut", *overrides, "steps=5", "resume=auto")
    assert metrics_of(resumed) == metrics_of(whole)
    ours, theirs = adapter_of(resumed.engine.module), adapter_of(whole.engine.module)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    last = "checkpoints/step-000005/optimizer.safetensors"
    assert (tmp_path / "whole" / last).read_bytes() == (tmp_path / "cut" / last).read_bytes()


@pytest.mark.slow
def test_the_built_in_model_trains_with_an_adapter(tmp_path: Path) -> None:
    run = run_once(tmp_path / "run", "adapter=lora", "checkpoint.every=3")
    assert all(line["logprob_gap_max"] == 0.0 for line in metrics_of(run) if line["step"])
    assert sorted(path.name for path in (run.run_dir / "checkpoints/step-000003/model").glob("adapter_*")) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    again = run_once(tmp_path / "run", "adapter=lora", "checkpoint.every=3", "steps=4", "resume=auto")
    assert [line["step"] for line in metrics_of(again)] == [0, 1, 2, 3, 4]


# -- memory -------------------------------------------------------------------------------------------------------


def test_the_ledger_counts_one_copy_of_the_weights_and_the_adapter_s_state(tmp_path: Path) -> None:
    overrides = overrides_of(tmp_path, model_of(torch.bfloat16), "algorithm.kl_coef=0.1")
    run = prepare(configure(tmp_path / "run", *overrides))
    run.close()
    rows = {row.name: (row.rollout, row.training) for row in run.memory.ledger.rows}
    trained = sum(p.numel() for p in run.engine.module.parameters() if p.requires_grad)
    assert rows["weights"] == (2 * sum(p.numel() for p in run.engine.module.parameters()),) * 2
    assert rows["reference weights"] == (0, 0)
    assert rows["fp32 masters"] == (4 * trained,) * 2
    assert rows["optimizer moments"] == (8 * trained,) * 2
    assert rows["fp32 gradients"][1] <= 4 * trained


@DTYPES
@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_an_update_takes_what_the_ledger_says(tmp_path: Path, dtype: torch.dtype, checkpointing: str) -> None:
    """Against the allocator's records, of rollouts that are all as long as can be."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    model = tiny_models.random_model("qwen3", vocab_size=tiny_models.TEXT_VOCAB, dtype=dtype, **sizes)
    shape = ["sampling.ignore_eos=true", "algorithm.kl_coef=0.1", f"model.gradient_checkpointing={checkpointing}"]
    shape += ["algorithm.micro_batch_tokens=100000", "rollout.max_model_len=108"]
    given = [o.replace("max_new_tokens=8", "max_new_tokens=100") for o in overrides_of(tmp_path, model)]
    run = prepare(configure(tmp_path / "run", *given, *shape))
    collected = run.trainer.collector.collect(0)
    peak = tiny_models.allocated_peak(lambda: run.trainer.update(run.trainer.prepare(collected), 0))
    run.close()
    rows = {row.name: row.training for row in run.memory.ledger.rows}
    assert rows["fp32 gradients"] + rows["activations and logits"] == pytest.approx(peak, rel=0.15)


# -- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@torch.no_grad()
def test_peft_loads_the_checkpoint_with_the_logits_of_the_engine_s_view(trained: Run) -> None:
    saved = trained.run_dir / "checkpoints/step-000003/model"
    named = json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"]
    base = AutoModelForCausalLM.from_pretrained(named)
    ids = torch.arange(4, 44)
    plain = base(input_ids=ids[None]).logits[0]
    expected = PeftModel.from_pretrained(base, saved)(input_ids=ids[None]).logits[0]
    engine = trained.engine
    pack = build_pack([(ids[:1].tolist(), [ids[1:].tolist()])], engine.layer_group, engine.device, row_multiple=16)
    view = engine.training_view()
    context = AttentionContext(pack.plan, engine.numerics.ops)
    ours = raw_logits(view, context, pack.ids, pack.positions, pack.logit_rows)[:39]
    assert (ours - expected[:39]).abs().max() < 1e-4
    assert (plain - expected).abs().max() > 1e-2


def test_a_checkpoint_comes_back_into_the_same_tensors(tmp_path: Path) -> None:
    model, other = model_of(), model_of()
    for module in (model, other):
        inject(module, LoraConfig(rank=4), seed=len(adapter_of(model)))
    optimizer = MasterAdamW(model.named_parameters(), OptimConfig())
    model(input_ids=torch.arange(9)[None]).logits.square().mean().backward()
    optimizer.step(1e-2)
    state = TrainerState(1, {}, 1)
    saved = checkpoint.save_checkpoint(tmp_path, state, model, tiny_models.byte_tokenizer(), optimizer, 2)
    assert not (saved / "model/model.safetensors").exists()
    addresses = [p.data_ptr() for p in other.parameters()]
    restored = MasterAdamW(other.named_parameters(), OptimConfig())
    checkpoint.load_checkpoint(saved, other, restored)
    assert [p.data_ptr() for p in other.parameters()] == addresses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    before, after = optimizer.state_tensors(), restored.state_tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("file", ["model/adapter_model.safetensors", "model/adapter_config.json"])
@pytest.mark.parametrize("damage", [_cut, Path.unlink])
def test_damage_is_named(tmp_path: Path, trained: Run, file: str, damage: Callable[[Path], None]) -> None:
    copy = shutil.copytree(trained.run_dir / "checkpoints/step-000003", tmp_path / "step-000003")
    damage(copy / file)
    with pytest.raises(ConfigError, match=rf"is damaged: {file} "):
        checkpoint.check_whole(copy)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (LoraConfig(rank=8), r"lora_A\.weight has shape \(4, 96\), and not \(8, 96\)"),
        (LoraConfig(rank=4, target_modules=["q_proj"]), "is no tensor of this model"),
        (AdapterConfig(), "is missing"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_by_tensor(trained: Run, changed: AdapterConfig, named: str) -> None:
    model = model_of()
    inject(model, changed)
    optimizer = MasterAdamW(model.named_parameters(), OptimConfig())
    with pytest.raises(ConfigError, match=rf"^resume: weights in .*: .*{named}"):
        checkpoint.load_checkpoint(trained.run_dir / "checkpoints/step-000003", model, optimizer)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("adapter.rank=8", r"^adapter\.rank: the run began with 4 and would go on with 8"),
        ("adapter.target_modules=[q_proj]", r"^adapter\.target_modules: the run began with 'all-linear'"),
    ],
)
def test_another_adapter_cannot_go_on(tmp_path: Path, trained: Run, override: str, message: str) -> None:
    given = [
        o for o in overrides_of(tmp_path, model_of()) if not o.startswith("adapter.rank") or "rank" not in override
    ]
    more = ["algorithm.kl_coef=0.1", override, "steps=4", f"resume={trained.run_dir}"]
    with pytest.raises(ConfigError, match=message):
        prepare(configure(tmp_path / "new", *given, *more))


@pytest.mark.parametrize("allowed", ["[]", "[model]"])
def test_another_base_cannot_go_on(tmp_path: Path, allowed: str) -> None:
    overrides = overrides_of(tmp_path, model_of(), "checkpoint.every=1", "steps=2")
    run_once(tmp_path / "run", *overrides)
    model = model_of()
    with torch.no_grad():
        model.model.norm.weight[3] += 0.5
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"^model\.path: the model has changed since the run began"):
        prepare(configure(tmp_path / "run", *overrides, "resume=auto", f"resume_changed={allowed}"))


def test_the_built_in_base_must_be_the_one_of_before(tmp_path: Path) -> None:
    """It is made anew, and differs with the number of threads, the kernels and the packages."""
    config, made = configure(tmp_path / "run", "adapter=lora"), model_of()
    made.save_pretrained(tmp_path / "made")
    kept = base_contents(config, None, tmp_path / "made")
    assert base_contents(config, kept, tmp_path / "made") == kept
    made.model.norm.weight.data[0] += 1.0
    made.save_pretrained(tmp_path / "made")
    with pytest.raises(ConfigError, match=r"^model: the tiny model that the run began with cannot be made here"):
        base_contents(config, kept, tmp_path / "made")
    assert base_contents(configure(tmp_path / "run"), kept, tmp_path / "made") == {}


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["adapter.rank=0"], r"^adapter\.rank=0: must be at least 1"),
        (["adapter.alpha=0"], r"^adapter\.alpha=0: must be at least 1"),
        (["adapter.target_modules=q_proj"], r"^adapter\.target_modules='q_proj': use all-linear, or a list of names"),
        (["adapter.target_modules=[]"], r"^adapter\.target_modules=\[\]: use all-linear"),
        (["adapter.target_modules=[q_proj,3]"], r"^adapter\.target_modules=\['q_proj', 3\]: use all-linear"),
        (["adapter.target_modules=null"], r"^adapter\.target_modules=None: use all-linear"),
        (["adapter.target_modules=[q_proj,q_proj]"], r"names a layer twice"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(tmp_path / "run", "adapter=lora", *overrides)


@pytest.mark.parametrize("name", ["qproj", "lm_head", "embed_tokens", "norm", "layers", "self_attn.q_proj"])
def test_a_name_that_no_linear_layer_has_is_refused_with_those_that_there_are(name: str) -> None:
    config = LoraConfig(target_modules=["q_proj", name])
    with pytest.raises(ConfigError, match=rf"^adapter\.target_modules='{name}': .*down_proj, gate_proj, k_proj"):
        check_adapter(config, model_of().config)


def test_without_peft_the_install_line_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = util.find_spec
    monkeypatch.setattr("trainer.weights.adapter.find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(ConfigError, match=r"^adapter=lora needs peft, .*: pip install -c constraints\.txt -e"):
        prepare(configure(tmp_path / "run", "adapter=lora"))
    prepare(dataclasses.replace(configure(tmp_path / "plain"), steps=1)).close()
