"""Tokens per second of generate_rollouts, beside other engines and other settings of this one.

Prompts are random and fresh in every call, so that no prefix cache helps; end tokens are ignored, log-probs returned.
A repeat runs every side once, in turn, so that the machine's moods hit all alike. Before the clock starts, each of our
engines has to agree with transformers on greedy completions.

tok_per_s: completion tokens / seconds of the call, prefill included. prefill_s: seconds of a second call beside it, on
other prompts of the same length, for one token of one completion each. decode_s: seconds of the call less prefill_s.
"""

import argparse
import json
import time
from dataclasses import fields
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench_report import (
    TOLERANCE,
    Figures,
    Side,
    Workload,
    add_comparison,
    check_groups,
    machine,
    make_parser,
    measure,
    open_engine,
    print_comparison,
    ratios,
    read_workload,
    settings,
    split_name,
    write_json,
)
from rollout import RolloutConfig, RolloutEngine, SamplingParams

KEY = "tok_per_s"
VERIFIED_PROMPTS, VERIFIED_TOKENS = 2, 8
VERIFY_SEED = 1 << 32  # beyond those of the repeats


def variant(text: str) -> tuple[str, dict[str, Any]]:
    """NAME=KEY=VALUE[,KEY=VALUE...], values as in JSON or plain text."""
    name, rest = split_name(text)
    known = {field.name for field in fields(RolloutConfig)}
    options: dict[str, Any] = {}
    for pair in rest.split(","):
        key, _, value = pair.partition("=")
        if key not in known:
            raise argparse.ArgumentTypeError(f"{key!r} is not a field of RolloutConfig: {', '.join(sorted(known))}")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return name, options


@torch.no_grad()
def verify(engine: RolloutEngine, reference: PreTrainedModel, workload: Workload) -> None:
    """Greedy completions are those of the reference, ties apart, with its log-probs; sampled ones are complete."""
    count = min(VERIFIED_TOKENS, max(workload.new_tokens))
    prompts = workload.prompts(engine, VERIFY_SEED)[:VERIFIED_PROMPTS]
    greedy = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    groups = engine.generate_rollouts(prompts, 1, greedy, progress=False)
    check_groups(groups, 1, [count] * len(prompts))
    for group in groups:
        (rollout,) = group.rollouts
        completion = torch.tensor(rollout.completion_ids, device=engine.device)
        ids = torch.cat([torch.tensor(group.prompt_ids, device=engine.device), completion])
        logits = reference(input_ids=ids[None], use_cache=False, logits_to_keep=count + 1).logits[0, :-1].float()
        expected = logits.log_softmax(-1)
        theirs = expected.gather(-1, completion[:, None])[:, 0]
        gap = float((torch.tensor(rollout.logprobs, device=engine.device) - theirs).abs().max())
        behind = float((expected.amax(-1) - theirs).max())
        # logits are rounded to the dtype, which alone moves large ones by more than the tolerance
        limit = TOLERANCE[engine.dtype] + float(logits.abs().max()) * torch.finfo(engine.dtype).eps
        if not (gap <= limit and behind <= limit):
            raise SystemExit(
                f"verification failed: greedy log-probs are up to {gap:.2g} nats from transformers', and tokens up to"
                f" {behind:.2g} less likely than its best; at most {limit:.2g} expected in {engine.dtype}"
            )
    sampled = SamplingParams(max_new_tokens=count, ignore_eos=True, seed=0)
    check_groups(
        engine.generate_rollouts(prompts, workload.n, sampled, progress=False), workload.n, [count] * len(prompts)
    )


def make_side(engine: RolloutEngine, workload: Workload) -> Side:
    """One of our engines."""

    def run(repeat: int) -> Figures:
        others, prompts = (workload.prompts(engine, 2 * repeat + i) for i in range(2))
        one_token = SamplingParams(max_new_tokens=1, ignore_eos=True, seed=repeat)
        began = time.perf_counter()
        engine.generate_rollouts(others, 1, one_token, progress=False)
        prefilled = time.perf_counter()
        groups = engine.generate_rollouts(prompts, workload.n, workload.sampling(seed=repeat), progress=False)
        seconds, prefill = time.perf_counter() - prefilled, prefilled - began
        check_groups(groups, workload.n, workload.counts)
        tok_per_s = workload.completion_tokens / seconds
        return {KEY: tok_per_s, "seconds": seconds, "prefill_s": prefill, "decode_s": seconds - prefill}

    return run


def open_engines(
    workload: Workload, options: dict[str, Any], variants: list[tuple[str, dict[str, Any]]]
) -> dict[str, RolloutEngine]:
    """Ours and its variants, on the same weights where they have the same dtype and device."""
    ours = open_engine(workload, options)
    engines = {"ours": ours}
    for name, changes in variants:
        if name in engines:
            raise SystemExit(f"error: two variants are called {name}")
        module = None if {"dtype", "device"} & changes.keys() else ours.module
        engines[name] = open_engine(workload, options | changes, module)
    return engines


def verify_all(engines: dict[str, RolloutEngine], workload: Workload) -> None:
    """Each engine against a model that transformers loads by itself."""
    for engine in engines.values():
        reference = AutoModelForCausalLM.from_pretrained(workload.model, dtype=engine.dtype, local_files_only=True)
        verify(engine, reference.to(engine.device).eval(), workload)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add_comparison(parser, repeats=5, key=KEY)
    parser.add_argument(
        "--variant",
        type=variant,
        action="append",
        default=[],
        metavar="NAME=KEY=VALUE[,KEY=VALUE...]",
        help="our engine with other fields of RolloutConfig, for example inexact=exact=off",
    )
    args = parser.parse_args(arguments)
    workload, options = read_workload(args)
    engines = open_engines(workload, options, args.variant)
    verify_all(engines, workload)
    sides = measure({name: make_side(e, workload) for name, e in engines.items()}, args.peer, KEY, args.repeats)
    stats = {name: engine.stats() for name, engine in engines.items()}
    report = {
        "benchmark": "rollouts",
        "settings": settings(workload, engines["ours"]) | {"variants": dict(args.variant), "peers": dict(args.peer)},
        "machine": machine(engines["ours"]),
        "completion_tokens": workload.completion_tokens,
        "engines": {
            name: {"exact": s.exact, "exact_reason": s.exact_reason, "preemptions": s.preemptions}
            for name, s in stats.items()
        },
        "sides": sides,
        "ratios": ratios(sides, KEY, more_is_better=True),
    }
    print_comparison(report, KEY)
    write_json(report, args.json)


if __name__ == "__main__":
    main()
