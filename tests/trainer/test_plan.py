"""`python -m trainer.plan`: what a configuration comes to, against figures worked out by hand."""

import json
import random
from pathlib import Path

import pytest
import torch

import tiny_models
from rollout import RolloutError
from rollout.memory.ledger import GIB, show_bytes
from rollout.schedule.block_pool import BlockPool, BlockTable, OutOfBlocksError
from trainer.plan import main, make_plan, parse_options, rollouts_that_fit

EIGHT_B_PARAMETERS = 8_190_735_360
"""2 x 151,936 x 4,096 of embeddings and head; 36 layers of 192,946,432; 4,096 of the last norm. A layer has 2 x 4,096^2
of q and o, 2 x 4,096 x 1,024 of k and v, 3 x 4,096 x 12,288 of the MLP, and norms of 2 x 4,096 and 2 x 128."""


# -- plan ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def eight_b(tmp_path: Path) -> Path:
    """A config.json of Qwen3-8B's shape, and nothing else."""
    shape = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
        "vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 40960, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return tmp_path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A config.json that names no dtype: 207,008 parameters, 512 positions, 256 numbers of KV to a token."""
    tiny_models.random_config("qwen3").save_pretrained(tmp_path)
    return tmp_path


def table(text: str) -> dict[str, tuple[str, str]]:
    """The rows of a rendered ledger."""
    lines = [line.rsplit(maxsplit=4) for line in text.splitlines() if line.count("iB") == 2 and ":" not in line]
    return {parts[0].strip(): (" ".join(parts[1:3]), " ".join(parts[3:])) for parts in lines if len(parts) == 5}


def test_the_plan_of_eight_billion_parameters_by_hand(eight_b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """28 GiB of KV hold 12,743 blocks of 16 x 147,456 bytes; 1,024 tokens take 64 of them."""
    arguments = ["gpu=80GiB", "fraction=0.35", "context=1024", "prompt=264", "n=16", "training=false"]
    assert main([f"model={eight_b}", *arguments]) == 0
    out = capsys.readouterr().out
    assert "147,456 bytes" in out
    assert "12,742 of 16 tokens (2.2 MiB each), and one for padding" in out
    weights = show_bytes(2 * EIGHT_B_PARAMETERS)
    assert weights == "15.26 GiB"
    rows = table(out)
    assert rows["weights"] == (weights, weights)
    assert rows["KV pool"] == (show_bytes(12_743 * 2_359_296),) * 2
    assert rows["fp32 masters"] == rows["optimizer moments"] == rows["fp32 gradients"] == ("0.0 MiB", "0.0 MiB")
    assert "199 rollouts of full length without sharing" in out
    # 16 blocks are shared and 48 each rollout's own: 16 groups of 784 hold 256, and the 198 left hold 3 of another
    assert "259 with 16 to a prompt" in out


def test_training_adds_masters_and_moments(eight_b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In bf16; in fp32 the weights are their own masters. Gradients are all there when the last layers' arrive."""
    small = ["context=64", "prompt=32", "n=2", "max_num_seqs=2", "micro_batch_tokens=96"]
    for dtype, masters in (("auto", "30.51 GiB"), ("float32", "0.0 MiB")):
        assert main([f"model={eight_b}", "gpu=80GiB", f"dtype={dtype}", *small]) == 1
        rows = table(capsys.readouterr().out)
        assert rows["fp32 masters"] == (masters, masters)
        assert rows["optimizer moments"] == ("61.03 GiB", "61.03 GiB")
        assert rows["fp32 gradients"] == ("0.0 MiB", "30.51 GiB")
    assert [show_bytes(size * EIGHT_B_PARAMETERS) for size in (4, 8)] == ["30.51 GiB", "61.03 GiB"]


def test_a_plan_with_adapters_has_no_state_of_the_weights(eight_b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """36 layers of 16 x 75,776: in and out of q and o 8,192 each, of k and v 5,120, of the MLP's three 16,384."""
    small = ["context=64", "prompt=32", "n=2", "max_num_seqs=2", "micro_batch_tokens=96"]
    assert main([f"model={eight_b}", "gpu=80GiB", "lora_rank=16", *small]) == 0
    rows, count = table(capsys.readouterr().out), 36 * 16 * 75_776
    assert rows["weights"] == (show_bytes(2 * (EIGHT_B_PARAMETERS + count)),) * 2
    assert rows["fp32 masters"] == (show_bytes(4 * count),) * 2
    assert rows["optimizer moments"] == (show_bytes(8 * count),) * 2
    assert rows["fp32 gradients"] == ("0.0 MiB", show_bytes(4 * count))


@pytest.mark.slow
def test_the_plan_of_training_eight_billion_parameters_at_full_length(
    eight_b: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """122 GiB of weights, masters, moments and gradients do not fit 80, whatever else there is."""
    peaks = []
    for saving in ("false", "true"):
        assert main([f"model={eight_b}", "gpu=80GiB", f"gradient_checkpointing={saving}"]) == 1
        out = capsys.readouterr().out
        missing = int(out.partition("the training peak lacks ")[2].partition("(")[2].partition(" bytes")[0])
        assert missing > 122 * GIB + 28 * GIB - 80 * GIB
        peaks.append(missing)
    assert peaks[1] < peaks[0] - 36 * 4096 * 30720 * 2


@pytest.mark.parametrize(("gpu", "status", "verdict"), [("64MiB", 0, "fits: "), ("2MiB", 1, "does not fit: the ")])
def test_the_exit_status_says_whether_it_fits(
    tiny: Path, capsys: pytest.CaptureFixture[str], gpu: str, status: int, verdict: str
) -> None:
    assert main([f"model={tiny}", f"gpu={gpu}", "context=64", "max_num_seqs=4"]) == status
    out, errors = capsys.readouterr()
    assert verdict in out
    assert errors == ""


def test_without_gpu_the_plan_is_for_this_machine(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the dtype that the model is loaded in here: a CPU runs what names none in float32."""
    assert main([f"model={tiny / 'config.json'}", "context=64", "max_num_seqs=4", "training=False"]) == 0
    out = capsys.readouterr().out
    assert "fits: " in out
    assert f"KV per token         {512 if torch.cuda.is_available() else 1024:,} bytes" in out


def test_a_plan_in_another_dtype_takes_what_that_takes(tiny: Path) -> None:
    """2 layers x 2 heads x 32 wide, keys and values: 256 numbers to a token. 35 % of 1 MB is 350,000 bytes."""
    for dtype, size, blocks in (("float32", 4, 20), ("bfloat16", 2, 41)):
        plan = make_plan(parse_options([f"model={tiny}", "gpu=1MB", f"dtype={dtype}", "training=false"]))
        assert (plan.kv_bytes_per_token, plan.num_blocks) == (256 * size, blocks)
        rows = {row.name: row.rollout for row in plan.ledger.rows}
        assert (rows["weights"], rows["KV pool"]) == (207_008 * size, (blocks + 1) * 16 * 256 * size)
        assert rows["KV pool"] <= 350_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch=1"], r"'nosuch=1' is not an option; say name=value with one of: model, gpu, fraction, context"),
        (["training"], r"'training' is not an option; say name=value"),
        (["gpu=lots"], r"'lots' is no amount of memory: write 80GiB, 24GB or a number of bytes"),
        (["gpu=-1GiB"], r"'-1GiB' is no amount of memory: it must be more than 0"),
        (["n=many"], r"n=many: say a whole number"),
        (["n=1.5"], r"n=1\.5: say a whole number"),
        (["n=0"], r"n=0: must be more than 0"),
        (["fraction=half"], r"fraction=half: say a number"),
        (["fraction=1.5"], r"fraction=1\.5: must lie in \(0, 1\]"),
        (["fraction=nan"], r"fraction=nan: must lie in \(0, 1\]"),
        (["training=maybe"], r"training=maybe: say true or false"),
        (["dtype=int4"], r"dtype='int4': use auto, float32 or bfloat16"),
        (["context=64", "prompt=64"], r"prompt=64 leaves no room for a completion within context=64"),
        (["context=1000"], r"=1000 is more than the model's max_position_embeddings of 512"),
        (["gpu=10000"], r"of 10000 bytes leaves no room for a KV block of 8192 bytes.*\(12884 bytes are missing\)"),
    ],
)
def test_an_option_that_cannot_be_used_ends_with_2_and_its_name(
    tiny: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    given = [f"model={tiny}", "gpu=1GiB", *arguments]
    assert main(given) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    with pytest.raises(RolloutError, match=message):
        raise RolloutError(errors)
    assert errors.startswith("error: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "neither a directory with a config.json nor such a file"),
        ("{", "not a model's configuration"),
        ("{}", "not a model's configuration"),
        ('{"model_type": "gpt2"}', "model_type='gpt2' is not supported; supported: qwen3, qwen2, llama"),
    ],
)
def test_a_model_that_cannot_be_planned_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert main([f"model={tmp_path}", "gpu=1GiB"]) == 2
    out, errors = capsys.readouterr()
    assert (out, message in errors, "Traceback" in errors) == ("", True, False), errors


def test_a_plan_of_no_model_says_how_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "error: model= is missing; usage: python -m trainer.plan model=DIR" in capsys.readouterr().err


# -- rollouts at once ---------------------------------------------------------------------------------------------


def test_rollouts_that_share_their_prompt_by_hand() -> None:
    """Of 5 blocks for 70 tokens, 2 are filled by 40 tokens of prompt: 4 rollouts take 2 + 4 x 3, a fifth 2 + 3."""
    assert rollouts_that_fit(20, 16, 40, 70, 4) == 5
    assert rollouts_that_fit(18, 16, 40, 70, 4) == 4
    assert rollouts_that_fit(4, 16, 40, 70, 4) == 0


def forked(pool: BlockPool, prompt: int, context: int, n: int) -> bool:
    """Whether n forks of a prompt could all be written to their end; nothing is left in the pool if not."""
    parent = BlockTable(pool)
    tables = [parent]
    try:
        parent.make_writable(0, prompt)
        tables += [parent.fork() for _ in range(n)]
        parent.free()
        for table in tables[1:]:
            table.make_writable(prompt, context)
    except OutOfBlocksError:
        for table in tables:
            table.free()
        return False
    return True


def test_as_many_rollouts_fit_as_a_pool_takes_forks() -> None:
    draw = random.Random(0)
    for _ in range(300):
        block_size, prompt, n = draw.randint(1, 20), draw.randint(1, 60), draw.randint(1, 9)
        context, num_blocks = prompt + draw.randint(1, 60), draw.randint(1, 150)
        pool, count = BlockPool(num_blocks, block_size), 0
        while forked(pool, prompt, context, n):
            count += n
        count += next((k for k in range(n - 1, 0, -1) if forked(pool, prompt, context, k)), 0)
        assert rollouts_that_fit(num_blocks, block_size, prompt, context, n) == count
