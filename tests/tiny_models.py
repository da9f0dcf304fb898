"""Models, tokenizers and oracles for tests: small, made here, and with answers that are known some other way.

transformers' own initialisation gives an almost uniform next token, which hides every bug in attention, positions and
masks; `random_model` scales the weights so that the next token's entropy lies well between 0 and log(vocabulary).
`chain_model` emits exactly the tokens, with exactly the probabilities, that a table asks for.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from rollout import RolloutConfig, RolloutEngine, RolloutGroup, SamplingParams
from rollout.model import Numerics

ARCHITECTURES = ("qwen3", "qwen2", "llama")
VOCAB = 211
"""Of `random_model`: odd, so that rows of logits never line up with vector registers."""
TEXT_VOCAB = 264
"""Of models that go with `byte_tokenizer`: a few ids more than the tokenizer knows."""
LOGPROB_TOLERANCE = 1e-4
"""Largest difference from an fp32 eager forward that log-probs may have, in nats."""
TIE = 1e-5
"""Two logits this close are a tie: greedy decoding may take either."""

_CONFIGS: dict[str, type[PretrainedConfig]] = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}
_NEVER = -60.0  # logit of what a chain's table does not list, next to log-probabilities


# -- engines ------------------------------------------------------------------------------------------------------


def small_engine(
    model: PreTrainedModel | Path, tokenizer: PreTrainedTokenizerFast | None = None, **options: Any
) -> RolloutEngine:
    """An engine on the CPU with a pool of a few hundred blocks; `options` go to its RolloutConfig."""
    sizes: dict[str, Any] = {"device": "cpu", "num_blocks": 400, "max_num_seqs": 64}
    return RolloutEngine(model, tokenizer, RolloutConfig(**sizes | options))


def numerics_of(model: PreTrainedModel, *, exact: bool = True) -> Numerics:
    return Numerics.of(model.device, model.dtype, exact=exact)


def greedy(max_new_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, **options)


def completions(groups: Sequence[RolloutGroup]) -> list[list[list[int]]]:
    """Completion ids of each group's rollouts."""
    return [[rollout.completion_ids for rollout in group.rollouts] for group in groups]


# -- models -------------------------------------------------------------------------------------------------------


def random_config(arch: str, **overrides: Any) -> PretrainedConfig:
    """Two layers of width 96, two kv heads; Qwen2 ties its embeddings, Qwen3 has heads wider than hidden / heads."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": arch == "qwen2",
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if arch == "qwen3":
        values["head_dim"] = 32
    return _CONFIGS[arch](**values | overrides)


def random_model(
    arch: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A model in eval mode, with weights from `seed` whose mistakes show; `overrides` go to its config."""
    config = random_config(arch, **overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    scramble(model, seed)
    return model.to(dtype).eval()


@torch.no_grad()
def scramble(model: PreTrainedModel, seed: int) -> None:
    """Draw all weights anew, in place: as wide as 0.16 at 96 inputs, and less with more of them."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.copy_(1.0 + 0.2 * noise)
        elif "embed_tokens" in name and not model.config.tie_word_embeddings:
            parameter.copy_(0.6 * noise)
        else:
            base = 0.12 if "embed_tokens" in name else 0.16
            parameter.copy_(base * math.sqrt(96 / parameter.shape[-1]) * noise)


Chain = Mapping[int, int | Mapping[int, float]]
"""For a token, the one that follows it, or the probability of each that may follow it (in proportion)."""


@torch.no_grad()
def chain_model(table: Chain, *, hidden: int = 64, vocab: int | None = None, **overrides: Any) -> PreTrainedModel:
    """A Llama whose next token hangs on the last one alone, as `table` says; after any other token all are equal.

    Embeddings are one-hot, attention and MLP add nothing, and the final norm turns a one-hot into sqrt(hidden) times
    it, so logits(next | last) = sqrt(hidden) * lm_head[next, last].
    """
    vocab = vocab or hidden
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16, "rms_norm_eps": 1e-12}
    values: dict[str, Any] = {"vocab_size": vocab, "hidden_size": hidden, "tie_word_embeddings": False} | sizes
    model = random_model("llama", **values | overrides)
    model.get_input_embeddings().weight.copy_(torch.eye(vocab, hidden))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.model.norm.weight.fill_(1.0)
    model.lm_head.weight.zero_()
    for last, following in table.items():
        odds = {following: 1.0} if isinstance(following, int) else following
        total = sum(odds.values())
        model.lm_head.weight[:, last] = _NEVER / math.sqrt(hidden)
        for token, weight in odds.items():
            model.lm_head.weight[token, last] = math.log(weight / total) / math.sqrt(hidden)
    return model


# -- tokenizers ---------------------------------------------------------------------------------------------------

PAD, EOS, BOS, USER = 0, 1, 2, 3
"""Ids of the special tokens of every tokenizer here."""
_SPECIAL = ["<pad>", "<eos>", "<bos>", "<user>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<user>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
BOS_CHAT_TEMPLATE = "{{ bos_token }}" + CHAT_TEMPLATE
TOOL_CHAT_TEMPLATE = """
{%- if tools %}{{ "tools: " + (tools | tojson) + "\n" }}{% endif %}
{%- for message in messages %}
    {%- if message.role in ("user", "system") %}{{ "<user>" + message.content + "\n" }}
    {%- elif message.role == "tool" %}{{ "result: " + message.content + "\n" }}
    {%- elif message.role == "assistant" %}{{ "A:" + (message.content or "") }}
        {%- for call in message.tool_calls or [] %}{{ "call: " + (call | tojson) }}{% endfor %}{{ "<eos>\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "A:" }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ "<think></think>" }}{% endif %}
{%- endif %}"""
"""In Qwen's manner: it renders tools and calls, reads enable_thinking, and leaves out roles that it does not know."""


def byte_tokenizer(
    *,
    adds_bos: bool = False,
    bos: bool = True,
    chat_template: str | dict[str, str] | None = CHAT_TEMPLATE,
    **options: Any,
) -> PreTrainedTokenizerFast:
    """One token per byte. adds_bos: its post-processor puts <bos> before a text. bos: it has one at all."""
    vocabulary = {token: i for i, token in enumerate(_SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer, adds_bos=adds_bos, bos=bos, chat_template=chat_template, **options)


def framed(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    """The tokenizer with a post-processor that frames every text, as in "<bos> $A <eos>"; changed in place."""
    special = [(token, _SPECIAL.index(token)) for token in template.split() if token != "$A"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


def metaspace_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """In SentencePiece's manner: one token per character, a space is a marker, and a text's first marker is dropped."""
    characters = ["\u2581", *map(chr, range(33, 127))]
    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, "<unk>", *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _wrapped(tokenizer, adds_bos=True, bos=True, chat_template=None, unk_token="<unk>", **options)


def _wrapped(
    tokenizer: Tokenizer, *, adds_bos: bool, bos: bool, chat_template: str | dict[str, str] | None, **options: Any
) -> PreTrainedTokenizerFast:
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    names: dict[str, Any] = {"pad_token": "<pad>", "eos_token": "<eos>", "additional_special_tokens": ["<user>"]}
    if bos:
        names["bos_token"] = "<bos>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **names | options)


def save_directory(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """A model directory as `save_pretrained` writes it."""
    model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


# -- oracles ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def eager_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """fp32 logits [T, V] of one unpadded row through transformers' eager attention."""
    assert model.config._attn_implementation == "eager"
    assert model.dtype == torch.float32
    logits: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def eager_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """fp64 log-probs [C] of the completion's tokens: log_softmax(logits / temperature) of an fp32 eager forward."""
    logits = eager_logits(model, [*prompt, *completion])[len(prompt) - 1 : -1]
    scores = (logits.double() / temperature).log_softmax(-1)
    return scores.gather(-1, torch.tensor(completion)[:, None])[:, 0]


def greedy_ids(
    model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int, end_ids: Sequence[int] = ()
) -> list[int]:
    """Completion that transformers' `generate` makes of one prompt."""
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=list(end_ids) or None, pad_token_id=0
    )
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    completion: list[int] = out[0, len(prompt) :].tolist()
    return completion


def assert_greedy(
    model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int], expected: Sequence[int]
) -> None:
    """The completion is what `generate` made; they may part only where the two best logits are a tie."""
    for place, (ours, theirs) in enumerate(zip(completion, expected, strict=True)):
        if ours != theirs:
            logits = eager_logits(model, [*prompt, *completion[:place]])[-1]
            best = logits.topk(2)
            assert best.values[0] - best.values[1] < TIE, f"token {place} is {ours}, generate made {theirs}"
            assert ours in best.indices.tolist()
            return


def random_prompts(lengths: Sequence[int], *, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Prompts of random ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]


def chi_square_p(counts: Sequence[float], expected: Sequence[float]) -> float:
    """P(chi-square statistic at least as large) of observed counts; cells expected below 5 are joined to one."""
    small = sum(e for e in expected if e < 5.0)
    cells = [(c, e) for c, e in zip(counts, expected, strict=True) if e >= 5.0]
    if small > 0:
        cells.append((sum(c for c, e in zip(counts, expected, strict=True) if e < 5.0), small))
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


@cache
def shared_model(arch: str) -> PreTrainedModel:
    """`random_model(arch)`, made once; for tests that leave it as it is."""
    return random_model(arch)


def allocated_peak(work: Callable[[], object]) -> int:
    """Highest sum of what torch's CPU allocator handed out and took back during `work`, by its own records."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as records:
        work()
    assert records.profiler is not None
    events = [e for e in records.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
