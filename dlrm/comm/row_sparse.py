"""Row-sparse gradients of replicated tables: only rows that samples touched travel.

Every rank holds all of such a table. A batch touches few of a large one's rows; the rest of its gradient is
zeros, and DistributedDataParallel sends those as well. Here a rank sends the rows that it touched, each once,
already summed over its samples, with their numbers. All ranks then add up what they got in the order of
ranks, so that all end with the same bits. How many rows each touched they tell each other first: where the
dense sum would be fewer bytes, all of them make the dense sum.

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

from dlrm.comm.collectives.messages import share

FP32_BYTES: Final = 4


class RowSums:
    """Sums gradients of tables, of which most rows are zeros, over the ranks of a group.

    Args:
        group: of the ranks; None: all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._num_ranks = dist.get_world_size(group)

    def sum_(self, tables: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
        """Replace gradients by their sums over ranks, in place; all ranks call it with the same shapes.

        Nothing is rounded on the way, and a NaN arrives everywhere.

        Args:
            tables: fp32 `[rows, columns]` each, contiguous; at most 2**31 rows.
            others: gradients, of any shape, that are not sparse.
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
        """For each table, how many rows each rank touched: what all decide by."""
        if not touched:
            return []
        own = torch.tensor([rows.numel() for rows in touched], device=touched[0].device)
        every = own.repeat(self._num_ranks, 1)
        share(list(every.unbind()), self._group)
        counts: list[list[int]] = every.t().tolist()
        return counts

    def _sum_rows_(self, gradient: Tensor, rows: Tensor, counts: Sequence[int]) -> None:
        columns = gradient.shape[1]
        lengths = [count * (1 + columns) for count in counts]
        messages = torch.split(gradient.new_empty(sum(lengths)), lengths)
        numbers, values = _parts(messages[self._rank], columns)
        numbers.copy_(rows)
        torch.index_select(gradient, 0, rows, out=values)
        share(messages, self._group)
        gradient.index_fill_(0, rows, 0.0)  # they are added when this rank's turn comes
        for message in messages:
            numbers, values = _parts(message, columns)
            # each row is there once, so that no two threads, or blocks of a GPU, add to the same one
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
    """Rows of a table's gradient that are not all zeros, in order: int64 `[n]`.

    A row that was looked up and has a gradient of zeros is not among them: there is nothing to add.

    Args:
        gradient: `[rows, columns]`.
    """
    # nothing cancels among absolute values, and PyTorch adds numbers up faster than it asks for any
    return gradient.abs().sum(1).nonzero().view(-1)


def bytes_by_rows(counts: Sequence[int], columns: int) -> float:
    """Bytes that leave the busiest rank if only touched rows travel.

    Args:
        counts: rows that each rank touched.
        columns: of the table.
    """
    return float((len(counts) - 1) * max(counts) * (1 + columns) * FP32_BYTES)


def bytes_dense(num_values: int, num_ranks: int) -> float:
    """Bytes that leave a rank in a dense sum: a ring, which all backends make of a large one."""
    return 2 * (num_ranks - 1) / num_ranks * num_values * FP32_BYTES


def send_touched_rows(
    module: DistributedDataParallel, tables: Mapping[nn.Parameter, Sequence[tuple[int, int]]]
) -> None:
    """Let a DDP module average the gradients of its tables by `RowSums`, and the rest densely as before.

    It is a communication hook: call it before the first backward pass, and register no other.

    Args:
        module: holds the tables.
        tables: by parameter, the rows and columns of the tables in it, one after the other; an
            `nn.Embedding`'s weight is one table, FBGEMM's flat weights are several.

    Raises:
        ValueError: a parameter is not fp32, or its tables do not fill it.
    """
    shapes = {id(parameter): list(of_parameter) for parameter, of_parameter in tables.items()}
    for parameter, of_parameter in tables.items():
        found = sum(rows * columns for rows, columns in of_parameter)
        if parameter.dtype != torch.float32 or found != parameter.numel():
            raise ValueError(
                f"a parameter of {parameter.numel()} values in {parameter.dtype} is said to hold tables of "
                f"{found} values in fp32; name all of its tables, or leave it out, so that it travels dense"
            )
    sums = RowSums(module.process_group)

    def average(
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # public, and DDP wants it there
    ) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        buffer /= dist.get_world_size(module.process_group)
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
    """Numbers of rows, int32 `[n]`, and rows `[n, columns]` of a flat message; views."""
    num_rows = message.numel() // (1 + columns)
    numbers, values = torch.split(message, [num_rows, num_rows * columns])
    return numbers.view(torch.int32), values.view(num_rows, columns)


def _tall_tables(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Neighbouring tables of one width as one tall table each; views."""
    tall, begin = [], 0
    for columns, neighbours in groupby(shapes, key=lambda shape: shape[1]):
        rows = sum(rows for rows, _ in neighbours)
        end = begin + rows * columns
        tall.append(flat.view(-1)[begin:end].view(rows, columns))
        begin = end
    return tall
