"""AUC, log loss, normalized entropy and calibration of predicted clicks, over all ranks, in bounded memory.

Log loss and calibration are plain sums. The AUC is the share of pairs (a click, a non-click) in which the
click has the higher score, ties counting one half, computed from one `QuantileSketch` for each class. Its
error is at most the sum of the two sketches' errors: the AUC is the mean of one distribution function over
the other distribution, so that an error of at most `e` in one of them changes it by at most `e`. The bound is
0 for up to `POINTS` scores of each class on a rank, and below 1e-4 for up to 10**11, whatever the scores are.
The sketches hold about 26 MiB for 10**9 scores, and 40 MiB for 10**11.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dlrm.metrics.means import SampleMean
from dlrm.metrics.sketch import CAPACITY, Floats, QuantileSketch

POINTS: Final = 2**17
"""Scores of each class that a rank sends to the others, together 1 MiB."""

BUFFER: Final = 2**16
"""Samples that are collected on their device before they are counted, so that CUDA rarely waits."""

HEADER: Final = 6
"""Number of float64 values at the head of a rank's message."""


@dataclass(frozen=True, kw_only=True)
class MetricValues:
    """Quality of predictions; undefined metrics are None, and `note` says why."""

    num_samples: int
    """Samples of all ranks."""
    num_clicks: int | None = None
    """Clicks among them."""
    auc: float | None = None
    """Area under the ROC curve."""
    auc_error_bound: float = 0.0
    """Largest difference of `auc` from the exact value; usually it is much smaller."""
    log_loss: float | None = None
    """Mean binary cross entropy, in nats."""
    normalized_entropy: float | None = None
    """`log_loss` over that of always predicting the share of clicks (He et al., 2014); less is better."""
    calibration: float | None = None
    """Predicted clicks over clicks; above 1 are too many."""
    note: str = ""
    """Why a metric is None; empty if none is."""
    means: Mapping[str, SampleMean] = field(default_factory=dict)
    """Metrics of the model's own, by name."""

    @property
    def is_of_clicks(self) -> bool:
        """Whether the metrics of clicks are meant; not if a model has metrics of its own and no logits."""
        return self.log_loss is not None or not self.means


class ClickMetrics:
    """Collects predictions of one evaluation on this rank, and computes the metrics of all ranks.

    Args:
        device: of the tensors given to `update`.
        capacity: of the `QuantileSketch` of each class.
        points: scores of each class that are sent to the other ranks.
    """

    def __init__(self, device: torch.device, capacity: int = CAPACITY, points: int = POINTS) -> None:
        self._scores = torch.empty(BUFFER, dtype=torch.float32, device=device)
        self._labels = torch.empty(BUFFER, dtype=torch.float32, device=device)
        self._buffered = 0
        self._points = points
        self._clicks = QuantileSketch(capacity)
        self._others = QuantileSketch(capacity)
        self._loss_sum = 0.0
        self._probability_sum = 0.0

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch: `logits` of any float type and `labels`, 0 or 1, both `[B]`.

        Raises:
            FloatingPointError: a logit is NaN or infinite (detected when the buffer is full).
            ValueError: a label is neither 0 nor 1 (likewise), or the shapes differ.
        """
        if logits.shape != labels.shape or logits.dim() != 1:
            raise ValueError(
                f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} must both be [B]"
            )
        start = 0
        while start < len(logits):
            end = min(len(logits), start + BUFFER - self._buffered)
            target = slice(self._buffered, self._buffered + end - start)
            self._scores[target].copy_(logits[start:end].detach())
            self._labels[target].copy_(labels[start:end])
            self._buffered = target.stop
            start = end
            if self._buffered == BUFFER:
                self._count_buffer()

    def compute(self) -> MetricValues:
        """Compute the metrics of all samples of all ranks, the same on every rank.

        If there is a default process group, every rank must call it, also one without samples; it is one
        all-gather of messages of a fixed size.

        Raises:
            FloatingPointError, ValueError: as `update`.
        """
        self._count_buffer()
        message = self._message()
        if not dist.is_initialized():
            return _reduce([message.cpu().numpy()], self._points)
        messages = [torch.empty_like(message) for _ in range(dist.get_world_size())]
        dist.all_gather(messages, message)
        return _reduce([each.cpu().numpy() for each in messages], self._points)

    def _count_buffer(self) -> None:
        scores = self._scores[: self._buffered].cpu().numpy()
        labels = self._labels[: self._buffered].cpu().numpy()
        self._buffered = 0
        if not np.isfinite(scores).all():
            bad = int((~np.isfinite(scores)).sum())
            raise FloatingPointError(
                f"{bad} of {len(scores)} predictions are NaN or infinite: the model has diverged. "
                "Lower the learning rate, or lengthen its warm-up"
            )
        clicked = labels == 1
        if not (clicked | (labels == 0)).all():
            raise ValueError("labels must be 0 or 1: look at the label column of the data set")
        wide = scores.astype(np.float64)
        # softplus of the logit towards the wrong label is exact for logits of any size
        self._loss_sum += float(np.logaddexp(0.0, np.where(clicked, -wide, wide)).sum())
        self._probability_sum += float(np.exp(-np.logaddexp(0.0, -wide)).sum())
        self._clicks.insert(scores[clicked])
        self._others.insert(scores[~clicked])

    def _message(self) -> torch.Tensor:
        """Encode this rank's float64 sums and float32 scores as int32 `[2 * (HEADER + points)]`."""
        header = np.array(
            [
                self._clicks.count,
                self._others.count,
                self._clicks.error_bound,
                self._others.error_bound,
                self._loss_sum,
                self._probability_sum,
            ],
            np.float64,
        )
        scores = np.zeros((2, self._points), np.float32)
        for row, sketch in zip(scores, (self._clicks, self._others), strict=True):
            points = sketch.points(self._points)
            row[: len(points)] = points
        words = np.concatenate([header.view(np.int32), scores.ravel().view(np.int32)])
        return torch.from_numpy(words).to(self._scores.device)


def _reduce(messages: list[NDArray[np.int32]], points: int) -> MetricValues:
    """Compute the metrics from the messages of all ranks."""
    headers = np.stack([message[: 2 * HEADER].view(np.float64) for message in messages])
    scores = np.stack([message[2 * HEADER :].view(np.float32).reshape(2, points) for message in messages])
    counts, errors = headers[:, :2], headers[:, 2:4]
    clicks, others = counts.sum(axis=0)
    loss_sum, probability_sum = headers[:, 4:].sum(axis=0)
    total = int(clicks + others)
    if total == 0:
        return MetricValues(num_samples=0, note="there are no samples")
    log_loss = float(loss_sum / total)
    if clicks == 0 or others == 0:
        return MetricValues(
            num_samples=total,
            num_clicks=int(clicks),
            log_loss=log_loss,
            calibration=float(probability_sum / clicks) if clicks else None,
            note=f"all {total} labels are {int(clicks > 0)}; it takes both to rank clicks above the others",
        )
    share = clicks / total
    entropy = -(share * np.log(share) + (1 - share) * np.log1p(-share))
    # a rank with more scores than it could send adds the error of its choice
    errors = errors + np.where(counts > points, 0.5 / points, 0.0)
    return MetricValues(
        num_samples=total,
        num_clicks=int(clicks),
        auc=auc_of(*(_pooled(scores[:, row], counts[:, row]) for row in range(2))),
        auc_error_bound=float((errors * counts).sum(axis=0) @ (1 / counts.sum(axis=0))),
        log_loss=log_loss,
        normalized_entropy=float(log_loss / entropy),
        calibration=float(probability_sum / clicks),
    )


def _pooled(scores: NDArray[np.float32], counts: NDArray[np.float64]) -> tuple[Floats, NDArray[np.float64]]:
    """Pool all ranks' scores of one class `[m]`, with the number of samples that each stands for `[m]`."""
    sent = np.minimum(counts, scores.shape[1]).astype(np.int64)
    values = np.concatenate([row[:length] for row, length in zip(scores, sent, strict=True)])
    return values, np.repeat(counts / np.maximum(sent, 1), sent)


def auc_of(clicks: tuple[Floats, NDArray[np.float64]], others: tuple[Floats, NDArray[np.float64]]) -> float:
    """Share of pairs in which the click is higher, ties one half; arguments are (values, weights)."""
    order = np.argsort(others[0])
    values = others[0][order]
    below = np.concatenate([[0.0], np.cumsum(others[1][order])])
    lower = below[np.searchsorted(values, clicks[0], side="left")]
    not_higher = below[np.searchsorted(values, clicks[0], side="right")]
    return float(clicks[1] @ (lower + not_higher) / (2 * clicks[1].sum() * below[-1]))
