"""Row-sparse sums of replicated tables' gradients: ranks send only the rows that their samples touched.

Every rank holds all of such a table, and a batch touches few rows of a large one; DistributedDataParallel
sends the zeros of the others as well. Here a rank sends each touched row once, summed over its samples, with
its number, and all ranks add the messages in the order of ranks, so that all get the same bits. Ranks first
exchange how many rows they touched, and make a dense sum where that is fewer bytes.

With `N` ranks, of which the busiest touched `n` of `R` rows of `k` fp32 columns, a rank sends
`(N-1) n (k+1) 4` bytes by rows and, in a ring, `2 (N-1)/N R k 4` dense: rows pay off where `n` is less than
about `2/N` of `R`.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dlrm.comm.collectives.collective import all_gather_in_place

FP32_BYTES: Final = 4


class RowSums:
    """Sums gradients of tables, most of whose rows are zeros, over ranks."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._num_ranks = dist.get_world_size(group)

    def sum_(self, tables: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
        """Replace gradients by their exact sums over ranks; all ranks call it with the same shapes.

        Args:
            tables: fp32 `[rows, columns]` each, contiguous; at most 2**31 rows.
            others: dense gradients of any shape.
        """
        if self._num_ranks == 1:
            return
        touched = [touched_rows(gradient) for gradient in tables]
        dense = list(others)
        for gradient, rows, counts in zip(tables, touched, self._counts_of_all(touched), strict=True):
            if bytes_by_rows(counts, gradient.shape[1]) < bytes_dense(gradient.numel(), self._num_ranks):
                self._sum_rows_(gradient, rows, counts)
            else:
                dense.append(gradient)
        self._sum_dense_(dense)

    def _counts_of_all(self, touched: Sequence[Tensor]) -> list[list[int]]:
        """Gather, for each table, how many rows each rank touched."""
        if not touched:
            return []
        own = torch.tensor([rows.numel() for rows in touched], device=touched[0].device)
        every = own.repeat(self._num_ranks, 1)
        all_gather_in_place(list(every.unbind()), self._group)
        counts: list[list[int]] = every.t().tolist()
        return counts

    def _sum_rows_(self, gradient: Tensor, rows: Tensor, counts: Sequence[int]) -> None:
        columns = gradient.shape[1]
        lengths = [count * (1 + columns) for count in counts]
        messages = torch.split(gradient.new_empty(sum(lengths)), lengths)
        numbers, values = _parts(messages[self._rank], columns)
        numbers.copy_(rows)
        torch.index_select(gradient, 0, rows, out=values)
        all_gather_in_place(messages, self._group)
        gradient.index_fill_(0, rows, 0.0)  # this rank's rows are added in its turn
        for message in messages:
            numbers, values = _parts(message, columns)
            # each row occurs once, so that no two threads, or blocks of a GPU, add to the same one
            gradient.scatter_add_(0, numbers.long().unsqueeze(1).expand_as(values), values)

    def _sum_dense_(self, gradients: Sequence[Tensor]) -> None:
        if not gradients:
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=self._group)
        totals = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, totals, strict=True):
            gradient.copy_(total.view_as(gradient))


def touched_rows(gradient: Tensor) -> Tensor:
    """Find the rows of a gradient `[rows, columns]` that are not all zeros: int64 `[n]`, ascending."""
    # absolute values cannot cancel, and `sum` is faster than `any`
    return gradient.abs().sum(1).nonzero().view(-1)


def bytes_by_rows(counts: Sequence[int], columns: int) -> float:
    """Bytes that leave the busiest rank if ranks send `counts` rows of a table."""
    return float((len(counts) - 1) * max(counts) * (1 + columns) * FP32_BYTES)


def bytes_dense(num_values: int, num_ranks: int) -> float:
    """Bytes that leave a rank in a dense sum: backends sum large vectors in a ring."""
    return 2 * (num_ranks - 1) / num_ranks * num_values * FP32_BYTES


def send_touched_rows(
    module: DistributedDataParallel, tables: Mapping[nn.Parameter, Sequence[tuple[int, int]]]
) -> None:
    """Register a hook that averages a DDP module's table gradients by `RowSums`, and other gradients densely.

    Call it before the first backward pass, and register no other hook.

    Args:
        module: holds the tables.
        tables: by parameter, the rows and columns of its consecutive tables; an `nn.Embedding`'s weight is
            one table, FBGEMM's flat weights are several.

    Raises:
        ValueError: a parameter is not fp32, or its tables do not fill it.
    """
    shapes = {id(parameter): list(of_parameter) for parameter, of_parameter in tables.items()}
    for parameter, of_parameter in tables.items():
        found = sum(rows * columns for rows, columns in of_parameter)
        if parameter.dtype != torch.float32 or found != parameter.numel():
            raise ValueError(
                f"a parameter of {parameter.numel()} values in {parameter.dtype} is declared to hold tables "
                f"of {found} values in fp32; name all of its tables, or leave it out, to sum it densely"
            )
    sums = RowSums(module.process_group)

    def average(
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # public, and DDP wants it there
    ) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        buffer /= dist.get_world_size(module.process_group)  # before the sum, as DDP does
        in_tables, others = [], []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if id(parameter) in shapes:
                in_tables += _tall_tables(gradient, shapes[id(parameter)])
            else:
                others.append(gradient)
        sums.sum_(in_tables, others)
        done: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.device.type == "cuda" else []
        )
        done.set_result(buffer)
        return done

    module.register_comm_hook(None, average)


def _parts(message: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """View a flat message as row numbers, int32 `[n]`, and rows `[n, columns]`."""
    num_rows = message.numel() // (1 + columns)
    numbers, values = torch.split(message, [num_rows, num_rows * columns])
    return numbers.view(torch.int32), values.view(num_rows, columns)


def _tall_tables(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """View consecutive tables of equal width as one tall table each."""
    tall, begin = [], 0
    for columns, neighbours in groupby(shapes, key=lambda shape: shape[1]):
        rows = sum(rows for rows, _ in neighbours)
        end = begin + rows * columns
        tall.append(flat.view(-1)[begin:end].view(rows, columns))
        begin = end
    return tall
