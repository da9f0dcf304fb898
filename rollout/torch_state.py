"""The state of torch that a caller may have set around a call, and that must not change what the engine computes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

from rollout.errors import RolloutError
from rollout_kernels.ops import holds_values

_CPU = torch.device("cpu")


@contextmanager
def own_torch_state(num_threads: int | None = None) -> Iterator[None]:
    """Run what is inside, or a function that this decorates, as in a fresh thread of torch.

    Without autocast, inference mode (gradients stay off where it was on) and a default device, and with num_threads
    threads for torch operations if it is given. Only what differs is changed, so that it costs nothing otherwise. The
    default dtype, which all threads share, is left alone: the engine names the dtype of whatever it makes.
    """
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device() != _CPU:
            stack.enter_context(_CPU)
        if num_threads is not None and num_threads != threads:
            stack.callback(torch.set_num_threads, threads)
            torch.set_num_threads(num_threads)
        yield


def check_parameters(module: PreTrainedModel) -> None:
    """Refuse parameters that hold no values, or that can neither be trained nor watched."""
    for name, parameter in module.named_parameters():
        if not holds_values(parameter):
            raise RolloutError(f"{name} is on the meta device, which holds no values: load the module's weights first")
        if parameter.is_inference():
            raise RolloutError(
                f"{name} was made under torch.inference_mode, so that its changes cannot be seen: make the module"
                " outside of it, or pass its directory"
            )
