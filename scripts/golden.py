"""Digests of a few small runs, to see whether a change of the code changes any result.

    python scripts/golden.py --out before.json        # on the code before
    python scripts/golden.py --against before.json    # after it: names what differs, and ends with 1

Each run trains a small random model of a family for a few steps, in a dtype, in compiled kernels or torch operations,
through the command line, and then draws from what it saved. Compare on one machine: bits differ between CPUs.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from rollout import generate_rollouts
from rollout.model.builtin import tiny_tokenizer
from rollout_kernels.cache import cache_directory

Digests = dict[str, str]

_SIZES = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "vocab_size": 264,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[PretrainedConfig | None, list[str]]] = {
    "tiny": (None, ["model.warm_start_steps=6"]),
    "qwen2": (
        Qwen2Config(**_SIZES, tie_word_embeddings=True),
        ["sampling.top_p=0.9", "optim.schedule=cosine", "rollout.prefill_chunk_size=7", "rollout.block_size=8"],
    ),
    "llama": (
        LlamaConfig(**_SIZES, head_dim=20),
        ["algorithm.kl_coef=0.1", "model.gradient_checkpointing=true", "algorithm.micro_batch_tokens=90"],
    ),
}
"""A model's configuration (None: the built-in one) and options of its runs, so that between them much is used."""
DTYPES = ("float32", "bfloat16")
KERNELS = ("native", "torch")
_STEPS = ["steps=4", "eval.every=2", "checkpoint.every=2", "tracking=none", "run_dir=run", "algorithm.group_size=4"]
_STEPS += ["algorithm.prompts_per_step=4", "task.eval_rows=6", "sampling.max_new_tokens=12", "optim.lr=1e-3"]
_PASSING = ("timing_s/", "memory/", "rollout/tokens_per_second", "rollout/time_")
"""Metrics that no two runs share."""


def make_model(config: PretrainedConfig, folder: Path, dtype: str) -> None:
    """A model directory with random weights from a fixed seed, and rows to train on beside it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    draw = random.Random(0)
    numbers = [(draw.randrange(10), draw.randrange(10)) for _ in range(40)]
    rows = [{"prompt": f"{'tell me ' * (a % 4)}{a}+{b}=", "answer": str(a + b)} for a, b in numbers]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = "def score(completion_ids, **_):\n    return [len(set(ids)) / 7 - ids[0] % 3 for ids in completion_ids]\n"
    (folder / "judge.py").write_text(reward)


def digest(*parts: bytes) -> str:
    """Of the parts, one behind the other."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def weights_digest(model: Path) -> str:
    """Of every tensor of a model directory, by name."""
    tensors = load_file(model / "model.safetensors")
    named = sorted(tensors.items())
    return digest(*(name.encode() + x.contiguous().view(torch.uint8).numpy().tobytes() for name, x in named))


def trajectory(family: str, dtype: str) -> Digests:
    """Train in this folder, then draw from what was saved, in this process."""
    from trainer.__main__ import main as train

    config, options = FAMILIES[family]
    if config is not None:
        make_model(config, Path(), dtype)
        options = [*options, "model=hf", "model.path=model", "task=jsonl", "task.path=rows.jsonl", "reward=custom"]
        options.append("reward.path=judge.py:score")
    sys.argv[1:] = [*options, *_STEPS, f"rollout.dtype={dtype}"]
    with contextlib.redirect_stdout(io.StringIO()):
        train()
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    lines = [{k: v for k, v in sorted(line.items()) if not k.startswith(_PASSING)} for line in lines]
    saved = Path("run/checkpoints/step-000004/model")
    groups = generate_rollouts(["3+4=", "tell me 12+30=", "0"], n=3, model=saved, max_new_tokens=20, seed=5)
    drawn = [rollout for group in groups for rollout in group.rollouts]
    return {
        "metrics": digest(json.dumps(lines).encode()),
        "weights": weights_digest(saved),
        "ids": digest(json.dumps([rollout.completion_ids for rollout in drawn]).encode()),
        "logprobs": digest(json.dumps([(rollout.logprobs, rollout.raw_logprobs) for rollout in drawn]).encode()),
    }


def record(family: str, dtype: str, kernels: str) -> Digests:
    """A trajectory in a process and a folder of its own."""
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        cache, kept = Path(folder) / "cache", cache_directory() / "kernels"
        cache.mkdir()
        if kept.exists():  # compiled once; the warm start is run again
            (cache / "kernels").symlink_to(kept.absolute())
        environment = os.environ | {
            "COWROLL_KERNELS": kernels, "COWROLL_CACHE": str(cache), "OMP_NUM_THREADS": "2",
            "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")]), "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        command = [sys.executable, __file__, "--one", family, dtype]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{family}, {dtype}, {kernels}: {done.stderr}")
    result: Digests = json.loads(done.stdout.splitlines()[-1])
    return result


def differing(before: dict[str, Digests], after: dict[str, Digests]) -> list[str]:
    """The runs, and what of each, whose digests differ; runs that only one side has are left out."""
    both = [name for name in before if name in after]
    return [f"{name}: {what}" for name in both for what in before[name] if before[name][what] != after[name].get(what)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the digests here")
    parser.add_argument("--against", type=Path, help="digests of an earlier run to compare with")
    parser.add_argument("--only", default="", help="runs whose name begins so, as in tiny-float32-native")
    parser.add_argument("--one", nargs=2, metavar=("FAMILY", "DTYPE"), help="this one here; prints its digests")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(trajectory(*args.one)))
        return
    results: dict[str, Any] = {}
    for family in FAMILIES:
        for dtype in DTYPES:
            for kernels in KERNELS:
                name = f"{family}-{dtype}-{kernels}"
                if name.startswith(args.only):
                    results[name] = record(family, dtype, kernels)
                    print(name, *results[name].values(), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")
    if args.against:
        different = differing(json.loads(args.against.read_text()), results)
        print(*(different or [f"all {len(results)} runs are the same in every bit"]), sep="\n")
        raise SystemExit(bool(different))


if __name__ == "__main__":
    main()
