"""FSDP2: a drafter whose weights, gradients and optimiser state lie in pieces, one in each process."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class FSDP2Strategy(ModelParallelStrategy):
    """Lightning's strategy with our checkpoints: one file, the same as DDP's, so either strategy resumes the other's.

    Lightning numbers the optimiser's state in the order of the module's parameters, DDP in the order of the optimiser's
    groups; here it is the latter for both.

    Args:
        size: processes that share the weights.
        timeout: of a collective.
    """

    def __init__(self, size: int, *, timeout: timedelta):
        super().__init__(
            data_parallel_size=size, tensor_parallel_size=1, save_distributed_checkpoint=False, timeout=timeout
        )

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Gather the state; whole in the first process, empty in the others."""
        assert self.model is not None
        plain = getattr(optimizer, "_optimizer", optimizer)
        named = get_optimizer_state_dict(self.model, plain, options=WHOLE)
        return _renamed(named, {name: number for number, name in enumerate(self._names(plain))}) if named else named

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the file in every process and keep this one's pieces of weights and optimiser state."""
        assert self.model is not None
        checkpoint = self.checkpoint_io.load_checkpoint(checkpoint_path)
        set_model_state_dict(self.model, checkpoint.pop("state_dict"), options=StateDictOptions(full_state_dict=True))
        for optimizer, numbered in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            named = _renamed(numbered, dict(enumerate(self._names(optimizer))))
            set_optimizer_state_dict(self.model, optimizer, named, options=StateDictOptions(full_state_dict=True))
        return checkpoint

    def _names(self, optimizer: Any) -> list[str]:
        """Names of the optimiser's parameters, in its own order."""
        assert self.model is not None
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _renamed(state: Mapping[str, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    """An optimiser's state with other keys for its parameters."""
    return {
        "state": {new[key]: value for key, value in state["state"].items()},
        "param_groups": [{**group, "params": [new[key] for key in group["params"]]} for group in state["param_groups"]],
    }


def shard_module(module: nn.Module, mesh: Any, *, step: str) -> None:
    """Divide all weights of ``module`` over ``mesh``; they are whole inside its method ``step`` and until the backward.

    One group for everything: a drafter's only layer runs once per training-time-test step, and its head is read
    inside the loss's autograd function, so pieces of it would be gathered again and again within one micro step.
    What is divided for good are the optimiser's state, the gradients between micro steps and the weights at rest.

    Args:
        module: changed in place.
        mesh: one axis of ``torch.distributed.DeviceMesh``.
        step: name of the method that returns the loss.
    """
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(module, step)


@contextmanager
def whole_weights(module: nn.Module) -> Iterator[None]:
    """Gather divided weights for the time of a ``with``; every process has to enter. Does nothing to undivided ones."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The value of a tensor that may lie in pieces; every process has to call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
