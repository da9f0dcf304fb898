"""AdamW on fp32 masters, written back into the working weights in place."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.config import ConfigError, OptimConfig


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based): linear warm-up, then the schedule down to 0 at num_steps."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    if config.schedule == "linear":
        return config.lr * (1.0 - done)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr


def check_tensors(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raises ConfigError unless both have the same names, with the same shapes and dtypes."""
    for name in expected:
        if name not in given:
            raise ConfigError(f"{name} is missing")
    for name, tensor in given.items():
        if name not in expected:
            raise ConfigError(f"{name} is no tensor of this model")
        wanted = expected[name]
        if tensor.shape != wanted.shape:
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}, and not {tuple(wanted.shape)}")
        if tensor.dtype != wanted.dtype:
            raise ConfigError(f"{name} is {tensor.dtype}, and not {wanted.dtype}")


@dataclass(frozen=True)
class OptimizerBytes:
    """What an optimizer keeps beside the weights, from its making on, in bytes."""

    masters: int = 0
    moments: int = 0


class MasterAdamW:
    """AdamW whose state, gradients and weights are fp32 whatever the working weights are in.

    bf16 weights do not move at small learning rates, so an fp32 master of each is stepped and rounded into the working
    parameter, whose storage the generator reads. Gradients accumulate in fp32 over micro-batches: a hook takes each
    parameter's gradient as soon as it is complete. fp32 parameters are their own masters.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> None:
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self.config = config
        self.masters: dict[str, Tensor] = {}
        self._hooks = []
        for name, parameter in self.parameters.items():
            working = parameter.detach()
            self.masters[name] = working if parameter.dtype == torch.float32 else working.float()
            hook = parameter.register_post_accumulate_grad_hook(self._accumulator(name))
            self._hooks.append(hook)
        # norms and biases are not decayed
        decayed = [m for m in self.masters.values() if m.ndim >= 2]
        plain = [m for m in self.masters.values() if m.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for master in self.masters.values():
            # made now, not by the first step, so that memory that lasts for one step lasts for all
            self._adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def _accumulator(self, name: str) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            master = self.masters[name]
            gradient = parameter.grad.float()
            parameter.grad = None
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

        return take

    def step(self, lr: float) -> float:
        """Clip, step, write back and clear the gradients; returns the gradient norm before clipping.

        Without any gradient (nothing counted in the loss), and with one that is not finite, nothing moves, moments
        included.
        """
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        norm = nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), dtype=torch.float32)
        if math.isfinite(norm) and norm > 0.0:
            nn.utils.clip_grads_with_norm_(list(self.masters.values()), self.config.max_grad_norm, norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self._write_back()
        self._adamw.zero_grad()
        return float(norm)

    @torch.no_grad()
    def _write_back(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.dtype != torch.float32:
                parameter.copy_(self.masters[name])

    @staticmethod
    def bytes_for(parameters: Iterable[nn.Parameter]) -> OptimizerBytes:
        """What it keeps of such parameters, on the meta device too: two fp32 moments, masters where they are no fp32.

        Gradients, which come and go with every step, are fp32 as well.
        """
        trained = [p for p in parameters if p.requires_grad]
        masters = sum(4 * p.numel() for p in trained if p.dtype != torch.float32)
        return OptimizerBytes(masters, sum(2 * 4 * p.numel() for p in trained))

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a resumed run needs, flat: moments and step counts, and masters that are not the parameters."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            for key, value in self._adamw.state.get(master, {}).items():
                tensors[f"{key}/{name}"] = value
            if self.parameters[name].dtype != torch.float32:
                tensors[f"master/{name}"] = master
        return tensors

    def check_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ConfigError unless these are of the names, shapes and dtypes that state_tensors() gives."""
        check_tensors(self.state_tensors(), tensors)

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what state_tensors() gave, all or nothing; raises ConfigError as check_state_tensors() does."""
        self.check_state_tensors(tensors)
        for name, tensor in self.state_tensors().items():
            tensor.copy_(tensors[name])
        self._write_back()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
