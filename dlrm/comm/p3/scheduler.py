"""P3: gradients travel in slices, first those that the next forward pass needs first, while training goes on.

Backward makes the last layer's gradient first, but the next forward wants the first layer's first, and only
needs one layer at a time. So gradients are cut into slices that are exchanged by one thread beside the
training loop, in an order by the layers' turn in the forward pass, and a layer waits for its own slices just
before it is used (Jayarajan et al., arXiv 1905.03960: with parameter servers, of which this keeps the queue
and leaves the servers). The result does not depend on the order: each slice is summed by itself.

All that ranks must agree on is equal by construction: slices follow from the parameters' names and sizes,
compared once, and `dlrm.comm.p3.comm_thread` has one order for all.
"""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dlrm.comm.collectives.timeouts import timeout_of
from dlrm.comm.consistency.parameters import check_alike, named_parameters, shaped_like
from dlrm.comm.p3.comm_thread import CommThread
from dlrm.comm.p3.param_order import ParamOrder
from dlrm.comm.p3.partial_step import PartialStep
from dlrm.comm.p3.side_stream import SideStream
from dlrm.comm.p3.slices import FUSE_VALUES, SLICE_VALUES, issue_order, lay_out

Sum = Callable[[Tensor], Tensor]
"""From a slice of this rank's gradient, fp32 `[n]`, to its sum over ranks; may change what it is given."""


class PriorityExchange:
    """Exchanges the gradients of an optimizer's parameters, and has it update them when they are next used.

    Example, with as many ranks as there are, or a single one:

        exchange = PriorityExchange(model, optimizer)
        with exchange:                        # finishes at the end, and ends its thread
            for batch in batches:
                loss = loss_of(model(batch))  # a layer waits for its slices and is updated first
                loss.backward()               # each gradient leaves as soon as it is there
                exchange.step()               # in place of optimizer.step(); waits for nobody
                if it_is_time_to_save:
                    exchange.finish()         # before anybody but the model reads parameters or optimizer

    What holds for the training loop:

    - One backward pass before each `step`; gradients are taken away as they come, so that `.grad` is None.
    - Learning rates are those at `step`, whenever the update comes.
    - A parameter without a gradient, on this rank or on all, counts as one whose gradient is 0.
    - Where a module is not called, but its parameters are read by one above it, that one waits for them.
    - The optimizer keeps its state by parameter, as PyTorch's do, and talks to no other rank in its `step`
      (LARS and LAMB do over `SharedNorms`; they need `local_norms` here). Gradients cannot be clipped by
      their common norm, which would have to wait for all.
    - On CUDA, NCCL must be able to run the two groups' collectives at the same time.

    Args:
        model: whose forward pass it is; a replica of the other ranks'.
        optimizer: of those of its parameters that are to be exchanged.
        group: of the replicas, used by nothing else; None makes one of all ranks.
        make_sum: from a slice's number of values to what sums such slices over the ranks in the courier's
            thread, called once for each in order; it keeps nothing that a checkpoint would need. None is an
            all-reduce.
        average: divide the sums by the number of ranks.
        slice_values: a slice has at most so many values.
        fuse_values: smaller tensors share a slice.

    Raises:
        ValueError: ranks have different parameters or options, or the optimizer has a parameter that the
            model has not; on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        group: dist.ProcessGroup | None = None,
        make_sum: Callable[[int], Sum] | None = None,
        average: bool = True,
        slice_values: int = SLICE_VALUES,
        fuse_values: int = FUSE_VALUES,
    ) -> None:
        named, problem = _parameters_of(model, optimizer)
        self._group, self._num_ranks = group, 1
        if dist.is_initialized():
            device = next((each.device for each in model.parameters()), torch.device("cpu"))
            self._group = dist.new_group(timeout=timeout_of(device)) if group is None else group
            self._num_ranks = dist.get_world_size(self._group)
            check_alike(named, self._group, (average, slice_values, fuse_values), problem)
        elif problem is not None:
            raise problem
        self._names, self._parameters = list(named), list(named.values())
        sizes = {name: parameter.numel() for name, parameter in named.items()}
        self._layout = lay_out(sizes, slice_values, fuse_values)
        self._divisor = self._num_ranks if average else 1
        make = make_sum or (lambda num_values: self._all_reduce)
        self._sums = [make(each.end - each.begin) for each in self._layout.slices]
        device = self._parameters[0].device
        self._flat = torch.zeros(sum(sizes.values()), device=device)
        self._pieces = [
            shaped_like(self._flat[place], parameter)
            for place, parameter in zip(self._layout.places, self._parameters, strict=True)
        ]
        self._side = SideStream(device)
        self._updates = PartialStep(optimizer)
        self._marked, self._pending = set[int](), set[int]()
        self._steps = 0
        self.waited_s = 0.0
        """Seconds that the training loop has waited for slices."""
        slices = self._layout.slices
        self._courier = CommThread(
            [each.name for each in slices], [len(each.parameters) for each in slices], self._send, self._agree
        )
        self._first_use = ParamOrder(model, self._parameters, self._update)
        self._hooks = self._hook_into(model, optimizer)

    @property
    def order(self) -> list[str]:
        """Names of the slices in the order in which they travel: the same on all ranks."""
        return [self._layout.slices[number].name for number in self._courier.order]

    def step(self) -> None:
        """In place of the optimizer's: what was computed since the last one is an update, when it is needed.

        Raises:
            ExchangeError: an exchange failed; the message names the slice.
        """
        self._courier.check()
        for index in sorted(set(range(len(self._pieces))) - self._marked):
            self._update([index])
            self._pieces[index].zero_()
            self._mark(index)
        self._updates.remember()
        self._marked.clear()
        self._pending.update(range(len(self._pieces)))
        self._steps += 1
        self._first_use.learn()
        self._update(self._first_use.unseen)

    def finish(self) -> None:
        """Wait for all that `step` has left to be done, so that parameters and optimizer can be read.

        No rank needs to do this when others do.

        Raises:
            ExchangeError: an exchange failed; the message names the slice.
        """
        self._update(range(len(self._pieces)))

    def close(self) -> None:
        """End the thread and leave the model as it was; what is not finished stays undone."""
        for hook in self._hooks:
            hook.remove()
        self._first_use.close()
        self._courier.close()

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
        """Be told of gradients, and of those who want to read what may not be up to date."""
        hooks: list[RemovableHandle] = []
        for index, parameter in enumerate(self._parameters):
            take = functools.partial(self._take, index)
            hooks.append(parameter.register_post_accumulate_grad_hook(take))  # type: ignore[no-untyped-call]

        def finish(*reader: object) -> None:
            self.finish()

        hooks.append(model.register_state_dict_pre_hook(finish))  # type: ignore[no-untyped-call]
        hooks.append(optimizer.register_state_dict_pre_hook(finish))
        return hooks

    def _take(self, index: int, parameter: Tensor) -> None:
        """A gradient is there: it is taken away, and its slices may go."""
        if index in self._marked:
            raise RuntimeError(
                f"{self._names[index]} got a second gradient before PriorityExchange.step: there is one "
                "backward pass in a step, without activation checkpoints that go backwards by themselves"
            )
        if index in self._pending:
            raise RuntimeError(
                f"{self._names[index]} was used before the update of the last step: the module that it was "
                "learned to wait for was not called; call modules in the same way in all steps, or "
                "PriorityExchange.finish before"
            )
        assert parameter.grad is not None, "autograd calls this when it has accumulated a gradient"
        self._pieces[index].copy_(parameter.grad)
        parameter.grad = None
        self._mark(index)

    def _mark(self, index: int) -> None:
        self._marked.add(index)
        self._side.give(index, finish=self._courier.is_measuring)
        for number in self._layout.slices_of[index]:
            self._courier.mark(number)

    def _update(self, indices: Iterable[int]) -> None:
        """Those of these parameters that wait for an update get it."""
        chosen = [index for index in indices if index in self._pending]
        if not chosen:
            return
        numbers = sorted({number for index in chosen for number in self._layout.slices_of[index]})
        begin = time.perf_counter()
        for number in numbers:
            self._courier.wait(number, self._steps)
        self.waited_s += time.perf_counter() - begin
        self._side.take(numbers)
        parameters = [self._parameters[index] for index in chosen]
        with torch.inference_mode(False), torch.no_grad():  # it may be an evaluation that comes next
            for index, parameter in zip(chosen, parameters, strict=True):
                parameter.grad = self._pieces[index].to(parameter.dtype)
            self._updates.update(parameters)
        for parameter in parameters:
            parameter.grad = None
        self._pending.difference_update(chosen)

    def _send(self, number: int) -> None:
        """Replace a slice by its sum, or mean, over ranks; in the courier's thread."""
        each = self._layout.slices[number]
        vector = self._flat[each.begin : each.end]
        with torch.no_grad(), self._side.beside(each.parameters, number, finish=self._courier.is_measuring):
            total = self._sums[number](vector)
            torch.div(total, self._divisor, out=vector)

    def _all_reduce(self, vector: Tensor) -> Tensor:
        if self._num_ranks > 1:
            dist.all_reduce(vector, group=self._group)
        return vector

    def _agree(self, ready_s: Sequence[float], takes_s: Sequence[float]) -> list[int]:
        """The order of slices, by rank 0's times; in the courier's thread."""
        turns = self._first_use.turns
        needed = [min(turns[index] for index in each.parameters) for each in self._layout.slices]
        order = torch.tensor(issue_order(ready_s, needed, takes_s), device=self._flat.device)
        if self._num_ranks > 1:
            with self._side.beside((), -1, finish=True):
                dist.broadcast(order, group=self._group, group_src=0)
        numbers: list[int] = order.tolist()
        return numbers


def _parameters_of(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, nn.Parameter], ValueError | None]:
    """Those to exchange by name, or why there are none: the other ranks are told before that is raised."""
    try:
        return named_parameters(model, optimizer), None
    except ValueError as error:
        return {}, error
