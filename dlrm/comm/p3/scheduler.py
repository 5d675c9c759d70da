"""P3: sends gradients in slices, those that the next forward pass needs first, in the background.

The backward pass computes the last layer's gradient first, but the next forward pass needs the first layer's
first, and one layer at a time. Gradients are cut into slices that a thread exchanges in the background, in
the order of the forward pass, and each layer waits for its own slices just before it is used. Jayarajan et
al. (arXiv 1905.03960) do this with parameter servers; here the slices are all-reduced, each by itself, so
that the result does not depend on the order. Ranks have the same slices, as these follow from the parameters'
names and sizes, which are compared once.
"""

import functools
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dlrm.comm.collectives.levels import timeout_of
from dlrm.comm.consistency import check_alike, named_parameters, shaped_like
from dlrm.comm.p3.comm_thread import CommThread, SideStream, StepSender
from dlrm.comm.p3.param_order import ParamOrder
from dlrm.comm.p3.slices import FUSE_VALUES, SLICE_VALUES, issue_order, lay_out


class PriorityExchange:
    """Exchanges the gradients of an optimizer's parameters, and updates these when they are next used.

        exchange = PriorityExchange(model, optimizer)
        with exchange:                        # finishes updates at the end, and ends the thread
            for batch in batches:
                loss = loss_of(model(batch))  # a layer waits for its slices and is updated first
                loss.backward()               # each gradient is sent as soon as it is computed
                exchange.step()               # replaces optimizer.step(); does not wait
                if it_is_time_to_save:
                    exchange.finish()         # before parameters or optimizer state are read

    Requirements on the training loop:

    - One backward pass before each `step`; gradients are removed as they come, so that `.grad` is None.
    - Learning rates are those at `step`, even if the update comes later.
    - A parameter without a gradient, on one rank or all, counts as one with a gradient of 0.
    - If a module is not called, but a module above reads its parameters, that one waits for them.
    - The optimizer keeps its state by parameter and does not communicate in its `step` (LARS and LAMB need
      `local_norms`). Gradients cannot be clipped by their common norm.
    - On CUDA, slices are sent at `step`, in an order of collectives that all ranks share, and NCCL keeps that
      order between its groups if `NCCL_LAUNCH_ORDER_IMPLICIT` is 1 (as the trainer sets it).

    Args:
        model: a replica of the other ranks' models.
        optimizer: of the parameters to exchange.
        slice_values: largest size of a slice.
        fuse_values: smaller tensors share a slice.

    Raises:
        ValueError: on all ranks: they have different parameters or options, or the optimizer has a parameter
            that is not the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        slice_values: int = SLICE_VALUES,
        fuse_values: int = FUSE_VALUES,
    ) -> None:
        named, problem = dict[str, nn.Parameter](), None
        try:
            named = named_parameters(model, optimizer)
        except ValueError as error:
            problem = error  # raised when the other ranks are informed
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        # a group of its own: the thread's collectives must not mix with those of the training loop
        self._group = dist.new_group(timeout=timeout_of(device))
        check_alike(named, self._group, (slice_values, fuse_values), problem)
        self._names, self._parameters = list(named), list(named.values())
        sizes = {name: parameter.numel() for name, parameter in named.items()}
        places, self._slices = lay_out(sizes, slice_values, fuse_values)
        self._slices_of: list[list[int]] = [[] for _ in places]
        for number, each in enumerate(self._slices):
            for index in each.parameters:
                self._slices_of[index].append(number)
        device = self._parameters[0].device
        self._flat = torch.zeros(sum(sizes.values()), device=device)
        self._pieces = [
            shaped_like(self._flat[place], parameter)
            for place, parameter in zip(places, self._parameters, strict=True)
        ]
        self._side = SideStream(device)
        self._updates = _PartialStep(optimizer)
        self._marked, self._pending = set[int](), set[int]()
        self._steps = 0
        self.waited_s = 0.0
        """Seconds that the training loop has waited for slices."""
        # the thread uses the attributes above
        sender: type[CommThread | StepSender] = StepSender if device.type == "cuda" else CommThread
        self._thread = sender(
            [each.name for each in self._slices],
            [len(each.parameters) for each in self._slices],
            self._send,
            self._agree,
        )
        self._param_order = ParamOrder(model, self._parameters, self._update)
        self._hooks = self._hook_into(model, optimizer)

    @property
    def order(self) -> list[str]:
        """Names of the slices in the order in which they are sent: the same on all ranks."""
        return [self._slices[number].name for number in self._thread.order]

    def step(self) -> None:
        """End a step: parameters are updated by its gradients when they are next used.

        If an exchange has failed, this and `finish` raise an `ExchangeError`, which names the slice.
        """
        self._thread.check()
        # parameters that this rank has not used send zeros: the other ranks wait for their slices
        for index in sorted(set(range(len(self._pieces))) - self._marked):
            self._update([index])
            self._pieces[index].zero_()
            self._mark(index)
        self._updates.remember()
        self._marked.clear()
        self._pending.update(range(len(self._pieces)))
        self._steps += 1
        self._param_order.learn()
        self._thread.end_step()
        self._update(self._param_order.unseen)  # no module waits for these, so they are updated at once

    def finish(self) -> None:
        """Wait for all pending updates, so that parameters and optimizer state can be read.

        Ranks may call it at different times.
        """
        self._update(range(len(self._pieces)))

    def close(self) -> None:
        """End the thread and remove all hooks; pending updates are dropped."""
        for hook in self._hooks:
            hook.remove()
        self._param_order.close()
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    def _hook_into(self, model: nn.Module, optimizer: Optimizer) -> list[RemovableHandle]:
        """Register hooks for new gradients, and for readers of states, which need finished updates."""
        hooks: list[RemovableHandle] = []
        for index, parameter in enumerate(self._parameters):
            take = functools.partial(self._take, index)
            hooks.append(parameter.register_post_accumulate_grad_hook(take))  # type: ignore[no-untyped-call]

        def finish(*reader: object) -> None:
            self.finish()

        # a state read between steps must not miss pending updates
        hooks.append(model.register_state_dict_pre_hook(finish))  # type: ignore[no-untyped-call]
        hooks.append(optimizer.register_state_dict_pre_hook(finish))
        return hooks

    def _take(self, index: int, parameter: Tensor) -> None:
        """Take a new gradient from its parameter and mark its slices."""
        if index in self._marked:
            raise RuntimeError(
                f"{self._names[index]} got a second gradient before PriorityExchange.step: there is one "
                "backward pass in a step, without activation checkpoints that run their own backward passes"
            )
        if index in self._pending:
            raise RuntimeError(
                f"{self._names[index]} was used before the update of the last step: the module that waits "
                "for it was not called; call modules in the same way in all steps, or call "
                "PriorityExchange.finish before"
            )
        assert parameter.grad is not None, "autograd calls this when it has accumulated a gradient"
        self._pieces[index].copy_(parameter.grad)
        parameter.grad = None
        self._mark(index)

    def _mark(self, index: int) -> None:
        self._marked.add(index)
        self._side.give(index, finish=self._thread.is_measuring)
        for number in self._slices_of[index]:
            self._thread.mark(number)

    def _update(self, indices: Iterable[int]) -> None:
        """Update the parameters among these whose update is pending."""
        chosen = [index for index in indices if index in self._pending]
        if not chosen:
            return
        numbers = sorted({number for index in chosen for number in self._slices_of[index]})
        begin = time.perf_counter()
        for number in numbers:
            self._thread.wait(number, self._steps)
        self.waited_s += time.perf_counter() - begin
        self._side.take(numbers)
        parameters = [self._parameters[index] for index in chosen]
        with torch.inference_mode(False), torch.no_grad():  # the caller may be an evaluation
            for index, parameter in zip(chosen, parameters, strict=True):
                parameter.grad = self._pieces[index].to(parameter.dtype)
            self._updates.update(parameters)
        for parameter in parameters:
            parameter.grad = None
        self._pending.difference_update(chosen)

    def _send(self, number: int) -> None:
        """Replace a slice by its mean over ranks; runs in the thread."""
        each = self._slices[number]
        vector = self._flat[each.begin : each.end]
        with (
            torch.no_grad(),
            self._side.background(each.parameters, number, finish=self._thread.is_measuring),
        ):
            dist.all_reduce(vector, group=self._group)
            vector /= dist.get_world_size(self._group)

    def _agree(self, ready_s: Sequence[float], takes_s: Sequence[float]) -> list[int]:
        """Agree on the order of slices by rank 0's times; runs in the thread."""
        turns = self._param_order.turns
        needed = [min(turns[index] for index in each.parameters) for each in self._slices]
        order = torch.tensor(issue_order(ready_s, needed, takes_s), device=self._flat.device)
        with self._side.background((), -1, finish=True):
            dist.broadcast(order, group=self._group, group_src=0)
        numbers: list[int] = order.tolist()
        return numbers


class _PartialStep:
    """Steps an optimizer, whose state must be kept by parameter, for a few parameters at a time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.remember()

    def remember(self) -> None:
        """Use the current learning rates and other options for updates from now on."""
        self._options: list[dict[str, Any]] = [
            {name: _kept(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]

    def update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Step only these parameters, by their gradients."""
        chosen, groups = set(map(id, parameters)), self._optimizer.param_groups
        self._optimizer.param_groups = [
            {**options, "params": own}
            for options, group in zip(self._options, groups, strict=True)
            if (own := [each for each in group["params"] if id(each) in chosen])
        ]
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups


def _kept(value: Any) -> Any:
    # a learning rate may be a tensor, which a scheduler changes in place
    return value.clone() if isinstance(value, Tensor) else value
