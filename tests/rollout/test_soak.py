"""Hundreds of calls of one engine, most of which go wrong: all blocks come back each time, and memory does not grow.

Run as a script in a process of its own, since what other tests leave behind would hide a leak, or look like one.
"""

import gc
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rollout import RolloutEngine, RolloutError, SamplingParams
from rollout.engine.handles import RolloutHandle
from tiny_models import assert_greedy, greedy, greedy_ids, random_model, random_prompts, small_engine

MAX_GROWTH = 20e6
PROMPTS = random_prompts([7, 22, 3, 30])
N = 3
NEW_TOKENS = 10
NUM_BLOCKS = 16
"""Of 4 tokens: each prompt fits with its completion, all at once do not."""


class InjectedError(Exception):
    """Raised where the test wants it."""


class Soak:
    """One engine, and what is done to it."""

    def __init__(self) -> None:
        self.draw = random.Random(0)
        self.model: PreTrainedModel = random_model("qwen3", num_hidden_layers=1)
        self.engine: RolloutEngine = small_engine(
            self.model, block_size=4, num_blocks=NUM_BLOCKS, max_num_seqs=6, prefill_chunk_size=9
        )
        self.counts: dict[str, int] = {}

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_new_tokens=NEW_TOKENS, seed=self.draw.randrange(1000))

    def run(self, num_calls: int) -> None:
        resident, warm_up = 0, num_calls // 3
        for call in range(1, num_calls + 1):
            one: Callable[[], None] = self.draw.choice(KINDS).__get__(self)
            one()
            self.counts[one.__name__] = self.counts.get(one.__name__, 0) + 1
            assert self.engine.stats().num_free_blocks == NUM_BLOCKS, f"call {call}: {one.__name__}"
            self.engine.pool.check_integrity([])
            self.engine.scheduler.check_integrity()
            assert not self.engine.has_work
            if call == warm_up:
                resident = resident_bytes()
        grown = resident_bytes() - resident
        assert grown < MAX_GROWTH, f"{grown} bytes more after {num_calls} calls than after {warm_up}"
        assert len(self.counts) == len(KINDS)
        assert min(self.engine.stats().preemptions, self.engine.stats().cow_copies) > warm_up
        self.greedy_call()

    # -- kinds of calls -------------------------------------------------------------------------------------------

    def plain(self) -> None:
        groups = self.engine.generate_rollouts(PROMPTS, N, self.sampling)
        assert [len(r.completion_ids) for group in groups for r in group.rollouts] == [NEW_TOKENS] * len(PROMPTS) * N

    def greedy_call(self) -> None:
        """With whatever weights there are by now; right against transformers."""
        prompt = self.draw.choice(PROMPTS)
        (group,) = self.engine.generate_rollouts([prompt], 1, greedy(6))
        assert_greedy(self.model, prompt, group.rollouts[0].completion_ids, greedy_ids(self.model, prompt, 6))

    def bad_prompt_raises(self) -> None:
        with pytest.raises(RolloutError, match="prompt 4"):
            self.engine.generate_rollouts([*PROMPTS, []], N, self.sampling)

    def bad_prompt_returns(self) -> None:
        groups = self.engine.generate_rollouts([PROMPTS[0], [-1], PROMPTS[1]], N, self.sampling, on_error="return")
        assert [group.error is None for group in groups] == [True, False, True]

    def forward_raises(self) -> None:
        self._disturbed(InjectedError)

    def interrupted_in_a_forward(self) -> None:
        self._disturbed(KeyboardInterrupt)

    def _disturbed(self, error: type[BaseException]) -> None:
        """In the middle of a forward: the first layer has written its KV. An interrupt is a real SIGINT."""
        assert self.engine._core.runner is not None
        left = self.draw.randrange(1, 25)

        def disturb(*_: object) -> None:
            nonlocal left
            left -= 1
            if left == 0 and error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            elif left == 0:
                raise error

        hook = self.engine._core.runner.view.model.layers[0].mlp.register_forward_pre_hook(disturb)
        try:
            with pytest.raises(error):
                self.draw.choice([self.plain, self._submitted])()
        finally:
            hook.remove()

    def interrupted_in_the_consumer(self) -> None:
        last = self.draw.randint(1, len(PROMPTS) * N)

        def consume() -> None:
            for taken, _ in enumerate(self.engine.stream_rollouts(PROMPTS, N, self.sampling), start=1):
                if taken == last:
                    signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            consume()

    def iterator_dropped(self) -> None:
        stream = self.engine.stream_rollouts(PROMPTS, N, self.sampling)
        for _ in range(self.draw.randrange(len(PROMPTS) * N)):
            next(stream)

    def _submitted(self, num_aborted: int = 0) -> None:
        """By hand, so that no call is there to clean up."""
        handles = [self.engine.submit(prompt, N, self.sampling) for prompt in PROMPTS]
        for _ in range(self.draw.randrange(30)):
            self.engine.step()
        self._finish(handles, num_aborted)

    def _finish(self, handles: list[RolloutHandle], num_aborted: int) -> None:
        for handle in self.draw.sample(handles, num_aborted):
            self.engine.abort(handle)
        while self.engine.has_work:
            self.engine.step()
        assert all(handle.done for handle in handles)

    def aborted(self) -> None:
        self._submitted(num_aborted=3)

    def forked(self) -> None:
        parent = self.engine.submit(PROMPTS[0], 1, self.sampling)
        for _ in range(self.draw.randint(4, 9)):
            self.engine.step()
        self._finish([parent, *(self.engine.fork(parent, 0) for _ in range(4))], self.draw.randrange(3))

    def weights_change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(self.draw.choice([0.98, 1.02]))
        self.engine.weights_updated()

    def memory_released(self) -> None:
        self.engine.release_memory()
        self.engine.restore_memory()


KINDS = (
    Soak.plain,
    Soak.greedy_call,
    Soak.bad_prompt_raises,
    Soak.bad_prompt_returns,
    Soak.forward_raises,
    Soak.interrupted_in_a_forward,
    Soak.interrupted_in_the_consumer,
    Soak.iterator_dropped,
    Soak.aborted,
    Soak.forked,
    Soak.weights_change,
    Soak.memory_released,
)


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from Linux's /proc")
@pytest.mark.parametrize("num_calls", [99, pytest.param(300, marks=pytest.mark.slow)])
def test_blocks_come_back_after_each_call_and_memory_does_not_grow(num_calls: int) -> None:
    tests = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(map(str, [tests, tests.parent, tests.parent / "kernels"]))
    command = [sys.executable, __file__, str(num_calls)]
    environment = os.environ | {"PYTHONPATH": path}
    script = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert script.returncode == 0, script.stderr[-3000:]


if __name__ == "__main__":
    # a shell that starts a job in the background leaves it ignoring interrupts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Soak().run(int(sys.argv[1]))
