"""The memory ledger: sums and sizes by hand, estimates against what torch's allocator hands out for the same work."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

import tiny_models
from rollout import RolloutConfig, RolloutError, SamplingParams
from rollout.forward.packing import Pack, build_pack
from rollout.memory.device import blocks_for, pool_size
from rollout.memory.estimate import (
    META,
    LiveBytes,
    TrainingPeak,
    rollout_peak,
    score_and_backward,
    training_peak,
    widest_pack,
)
from rollout.memory.ledger import GIB, MIB, Ledger, LedgerRow, parse_bytes, show_bytes
from rollout.model.kv_cache import LayerGroup
from rollout.model.numerics import Numerics
from rollout.model.views import training_view
from rollout_kernels.shapes import ROW_MULTIPLE
from tiny_models import numerics_of

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


# -- amounts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000", 1000), ("80GiB", 85_899_345_920), ("24 GB", 24_000_000_000), ("1.5kb", 1500), ("0.5MiB", 524_288),
        ("3KiB", 3072),
        ("1e3", 1000), ("2TiB", 2_199_023_255_552), (" 7 B", 7), ("80gib", 85_899_345_920),
    ],
)  # fmt: skip
def test_amounts_of_memory_are_read(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "80 apples", "80G", "nan", "inf", "1e999GiB", "1,000", "80GiB2", "0x10"])
def test_what_is_no_amount_is_refused_with_examples(text: str) -> None:
    with pytest.raises(RolloutError, match="is no amount of memory: write 80GiB, 24GB or a number of bytes") as raised:
        parse_bytes(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("text", ["0", "-1GiB", "0.4"])
def test_no_memory_at_all_is_refused(text: str) -> None:
    with pytest.raises(RolloutError, match=f"'{text}' is no amount of memory: it must be more than 0"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0.0 MiB"), (2_621_440, "2.5 MiB"), (GIB, "1.00 GiB"), (1536 * MIB, "1.50 GiB"), (2000 * GIB, "2,000.00 GiB")],
)
def test_amounts_of_memory_are_shown(size: int, shown: str) -> None:
    assert show_bytes(size) == shown


# -- ledger -------------------------------------------------------------------------------------------------------

ROWS = (LedgerRow("weights", 3 * MIB, 3 * MIB), LedgerRow("activations", 4 * MIB, 1 * MIB))


@pytest.mark.parametrize(
    ("rows", "capacity", "missing", "verdict"),
    [
        (ROWS, 7 * MIB, 0, "fits: 0.0 MiB of 7.0 MiB are left at the rollout peak"),
        (ROWS, 9 * MIB, 0, "fits: 2.0 MiB of 9.0 MiB are left at the rollout peak"),
        (ROWS, 7 * MIB - 1, 1, "does not fit: the rollout peak lacks 0.0 MiB (1 bytes) of 7.0 MiB"),
        (
            (*ROWS, LedgerRow("gradients", 0, 5 * MIB)),
            7 * MIB,
            2 * MIB,
            "does not fit: the training peak lacks 2.0 MiB (2097152 bytes) of 7.0 MiB",
        ),
    ],
)
def test_the_verdict_is_of_the_higher_column(
    rows: tuple[LedgerRow, ...], capacity: int, missing: int, verdict: str
) -> None:
    ledger = Ledger(rows, capacity)
    assert (ledger.missing, ledger.verdict) == (missing, verdict)
    assert ledger.peak == max(ledger.rollout_peak, ledger.training_peak)


def test_the_table_ends_with_its_sums_and_the_verdict() -> None:
    lines = Ledger(ROWS, 8 * MIB).render().splitlines()
    assert [line.split() for line in lines[:-1]] == [
        ["memory", "rollout", "training"],
        ["weights", "3.0", "MiB", "3.0", "MiB"],
        ["activations", "4.0", "MiB", "1.0", "MiB"],
        ["peak", "7.0", "MiB", "4.0", "MiB"],
    ]
    assert lines[-1] == "fits: 1.0 MiB of 8.0 MiB are left at the rollout peak"


# -- KV pool ------------------------------------------------------------------------------------------------------

GROUP = LayerGroup(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float32)
"""128 bytes to a token: 2,048 to a block of 16."""


@pytest.mark.parametrize(("total", "blocks"), [(8192, 1), (12287, 1), (12288, 2), (40960, 9), (4096 * 1000, 24)])
def test_the_pool_and_its_padding_block_stay_within_the_fraction(total: int, blocks: int) -> None:
    """Half of the total is the pool's; 4 sequences of 65 tokens need 4 x (5 + 1) blocks at most."""
    config = RolloutConfig(memory_fraction=0.5, max_num_seqs=4)
    assert pool_size(config, [GROUP], 65, total) == blocks
    assert (blocks + 1) * 2048 <= total / 2


@pytest.mark.parametrize(("total", "missing"), [(8190, 1), (4096, 2048), (1, 4096)])
def test_a_pool_of_not_one_block_names_the_bytes_that_are_missing(total: int, missing: int) -> None:
    with pytest.raises(RolloutError, match=rf"memory_fraction=0\.5 of {total} bytes.*\({missing} bytes are missing\)"):
        pool_size(RolloutConfig(memory_fraction=0.5), [GROUP], 64, total)


def test_given_blocks_are_taken_whatever_the_fraction() -> None:
    assert pool_size(RolloutConfig(num_blocks=1000), [GROUP], 64, 1) == 1000


@pytest.mark.parametrize(("sequences", "length", "blocks"), [(1, 1, 2), (1, 16, 2), (1, 17, 3), (3, 33, 12)])
def test_blocks_for_sequences_that_share_nothing(sequences: int, length: int, blocks: int) -> None:
    assert blocks_for(sequences, length, 16) == blocks


# -- live bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_live_bytes_by_hand(device: str) -> None:
    with LiveBytes() as live:
        a = torch.zeros(100, device=device)
        b = torch.zeros(50, dtype=torch.bfloat16, device=device)
        assert live.live == 500
        view = a.view(10, 10).t()[2:]
        a.add_(1.0)
        assert live.live == 500  # a view and a change in place take nothing
        del a
        assert live.live == 500  # the view still holds it
        c = view + 1.0
        assert live.live == 500 + 320
        del view, b, c
    assert (live.live, live.peak) == (0, 820)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_was_there_before_is_not_counted(device: str) -> None:
    """Neither views of it nor changes in place are new memory: weights and KV have rows of their own."""
    before = torch.zeros(100, 100, device=device)
    rows = torch.zeros(7, 100, device=device)
    with LiveBytes() as live:
        before.add_(1.0)
        views = before.t(), before[:10]
        out = torch.nn.functional.linear(rows, before)
        assert (live.live, live.peak) == (7 * 100 * 4, 7 * 100 * 4)
    del views, out


def test_live_bytes_are_those_of_the_allocator() -> None:
    def work() -> None:
        x = torch.randn(300, 40)
        for width in (70, 10, 50):
            x = (x @ torch.randn(x.shape[1], width)).relu()

    with LiveBytes() as live:
        work()
    assert live.peak == tiny_models.allocated_peak(work)


# -- training estimate --------------------------------------------------------------------------------------------


def lone_pack(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, prompt: int, new: int, n: int
) -> Pack:
    return build_pack(
        [([0] * prompt, [[0] * new] * n)], LayerGroup.of(config, dtype), device, row_multiple=ROW_MULTIPLE
    )


def estimated(
    config: PretrainedConfig,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    device: torch.device = CPU,
    **options: Any,
) -> TrainingPeak:
    chosen = {"gradient_checkpointing": False, "accumulated": False} | options
    return training_peak(
        config,
        dtype,
        lone_pack(config, dtype, META, *shape),
        score_and_backward,
        Numerics.of(device, dtype),
        **chosen,
    )


def measured(
    config: PretrainedConfig,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    *,
    gradient_checkpointing: bool = False,
    accumulated: bool = False,
    peak: Callable[[Callable[[], object]], int] = tiny_models.allocated_peak,
) -> int:
    """Bytes that the same step takes on the CPU, with real weights and tokens, gradients summed up in fp32."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    view = training_view(model, numerics_of(model), gradient_checkpointing=gradient_checkpointing)
    pack = lone_pack(config, dtype, CPU, *shape)
    sums: dict[int, torch.Tensor] = {}

    def take(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        if id(parameter) in sums:
            sums[id(parameter)].add_(gradient)
        else:
            sums[id(parameter)] = gradient.float()

    def step() -> None:
        if accumulated:
            sums.update({id(p): torch.zeros_like(p, dtype=torch.float32) for p in view.parameters()})
        score_and_backward(view, pack)

    for parameter in view.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    return peak(step)


def live_peak(work: Callable[[], object]) -> int:
    with LiveBytes() as live:
        work()
    assert isinstance(live.peak, int)
    return live.peak


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_tensors_without_data_take_what_real_ones_take(arch: str, dtype: torch.dtype) -> None:
    """The estimate dispatches the very operations of the real step, so not a byte may differ."""
    config = tiny_models.random_config(arch)
    for accumulated in (False, True):
        peak = estimated(config, dtype, (40, 60, 4), accumulated=accumulated)
        assert peak.activations + peak.gradients == measured(
            config, dtype, (40, 60, 4), accumulated=accumulated, peak=live_peak
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_is_known_before_it_runs(dtype: torch.dtype, accumulated: bool, checkpointing: bool) -> None:
    """Short by what is taken inside one operation: a CPU's bf16 products copy, checkpointing keeps random state."""
    config = tiny_models.random_config("qwen3")
    options: dict[str, Any] = {"gradient_checkpointing": checkpointing, "accumulated": accumulated}
    peak, real = estimated(config, dtype, (40, 60, 6), **options), measured(config, dtype, (40, 60, 6), **options)
    short = 0.03 if dtype == torch.bfloat16 else 0.003
    assert (1.0 - short) * real <= peak.activations + peak.gradients <= real


@pytest.mark.parametrize("checkpointing", [False, True])
def test_six_layers_are_known_from_two_and_four(checkpointing: bool) -> None:
    """Of one long rollout, where what all layers share is as much as a layer's own."""
    config, shape = tiny_models.random_config("qwen3", num_hidden_layers=6), (64, 300, 1)
    options: dict[str, Any] = {"gradient_checkpointing": checkpointing, "accumulated": True}
    peak, real = estimated(config, torch.float32, shape, **options), measured(config, torch.float32, shape, **options)
    assert peak.activations + peak.gradients == pytest.approx(real, rel=0.01)


def test_checkpointing_keeps_less_and_accumulated_gradients_are_those_of_all_parameters() -> None:
    config = tiny_models.random_config("qwen3", num_hidden_layers=8)
    plain, saving = (
        estimated(config, torch.bfloat16, (40, 60, 6), gradient_checkpointing=on, accumulated=True)
        for on in (False, True)
    )
    assert saving.activations < 0.5 * plain.activations
    assert (
        saving.gradients
        == plain.gradients
        == 4 * tiny_models.random_model("qwen3", num_hidden_layers=8).num_parameters()
    )


def test_the_widest_pack_is_full_and_holds_a_whole_completion() -> None:
    """20 tokens of prompt and completions of 10, the last one cut; a completion's last token needs no row."""
    for max_tokens, groups, rows, targets in (
        (1, 1, 29, 10),
        (50, 1, 47, 30),
        (45, 1, 42, 25),
        (1000, 1, 92, 80),
        (1000, 2, 184, 160),
        (125, 9, 20 + 72 + 20 + 4, 85),
    ):
        pack = widest_pack(GROUP, 20, 10, 8, groups, max_tokens, row_multiple=1)
        assert (len(pack.ids), len(pack.targets)) == (rows, targets)


# -- rollout estimate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "prompt", "new", "batched"), [(4001, 40, 24, 160), (211, 200, 8, 800)])
def test_the_largest_iteration_of_an_engine_is_known(
    dtype: torch.dtype, vocab: int, prompt: int, new: int, batched: int
) -> None:
    """4 prompts fill a prefill, their 32 rollouts a decode; beside it rest the prompts' logits and the last ids."""
    model = tiny_models.random_model("qwen3", dtype=dtype, vocab_size=vocab)
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True, seed=0)
    prompts = tiny_models.random_prompts([prompt] * 4)
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": batched, "prefix_cache": False}
    with tiny_models.small_engine(model, **sizes) as engine:
        real = tiny_models.allocated_peak(lambda: engine.generate_rollouts(prompts, 8, sampling))
        config = dataclasses.replace(engine.config, num_blocks=None)
        peak = rollout_peak(
            model.config, dtype, config, engine.pool.num_blocks, prompt, new, 8, sampling, engine.numerics
        )
    assert peak == pytest.approx(real, rel=0.02)


def test_another_device_is_not_planned_with_this_cpus_kernels(use_kernels: Callable[[str], None]) -> None:
    """A plan for a GPU is the same whether or not there is a compiler here."""
    config, engine, cuda = tiny_models.random_config("qwen3"), RolloutConfig(max_num_seqs=4), torch.device("cuda")

    def planned() -> tuple[int, TrainingPeak]:
        numerics = Numerics.of(cuda, torch.bfloat16)
        rollout = rollout_peak(config, torch.bfloat16, engine, 500, 40, 24, 4, SamplingParams(), numerics)
        return rollout, estimated(config, torch.bfloat16, (40, 60, 4), device=cuda)

    usual = planned()
    use_kernels("torch")
    assert planned() == usual


def test_a_larger_pool_is_no_activation() -> None:
    """KV has a row of its own; 500 blocks are enough for all that an iteration may take."""
    config, engine = tiny_models.random_config("qwen3"), RolloutConfig(max_num_seqs=4)
    numerics = Numerics.of(CPU, torch.float32)
    small, large = (
        rollout_peak(config, torch.float32, engine, blocks, 40, 24, 4, SamplingParams(), numerics)
        for blocks in (500, 5000)
    )
    assert small == large
