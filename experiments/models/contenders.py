"""Trains one of our models, or its counterpart, on the same batches in the same order, and evaluates it."""

from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Final

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.model_parallel import DistributedModelParallel

from data.dataset import read_manifest
from data.loader import DataLoader, LoaderConfig
from dlrm.config.recipe import load_config
from dlrm.config.schema import DenseOptimizer, ScheduleConfig
from dlrm.config.table_optimizers import TABLE_OPTIMIZERS
from dlrm.launch.device import Ranks
from dlrm.optim.build import schedule_factor
from dlrm.training.data import Inputs, prepare
from dlrm.training.evaluation import evaluate
from experiments.harness.record import Row
from experiments.harness.training import Training
from experiments.models.references import ReferenceData, build_reference, tables_of

OURS, REFERENCE = "ours", "reference"
RECIPES: Final = {"dlrm": "tiny", "dcnv2": "dcnv2", "deepfm": "deepfm", "fm": "fm", "lr": "lr"}
"""Recipe of each model, whose layers both sides have."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Optimizers and learning rates of a run."""

    tables: str
    tables_rate: float
    dense: DenseOptimizer
    dense_rate: float
    warmup_steps: int = 0

    def __str__(self) -> str:
        warmup = f", warm-up {self.warmup_steps}" if self.warmup_steps else ""
        return f"{self.tables} {self.tables_rate:g}, {self.dense} {self.dense_rate:g}{warmup}"


@dataclass(frozen=True, kw_only=True)
class Task:
    """Data that a run trains on and is evaluated on."""

    dataset: str
    train_days: tuple[int, ...]
    evaluated_day: int


def train(task: Task, kind: str, side: str, setting: Setting, seed: int) -> Row:
    """Train for one epoch and evaluate; the model and the data's order depend on `seed`."""
    inputs = _inputs(task, kind, side, setting, seed)
    try:
        model: nn.Module = _train_ours(inputs) if side == OURS else _train_reference(inputs, setting)
        values = evaluate(model, inputs.test_loader, inputs.device)
    finally:
        inputs.close()
    return {
        "model": kind,
        "side": side,
        "setting": str(setting),
        **asdict(setting),
        "day": task.evaluated_day,
        "seed": seed,
        "steps": len(inputs.loader),
        "auc": values.auc,
        "log_loss": values.log_loss,
        "calibration": values.calibration,
    }


def _inputs(task: Task, kind: str, side: str, setting: Setting, seed: int) -> Inputs:
    recipe = RECIPES[kind]
    usual = load_config(recipe)
    config = replace(
        usual,
        data=replace(
            usual.data, uri=task.dataset, train_days=task.train_days, test_days=(task.evaluated_day,)
        ),
        schedule=ScheduleConfig(warmup_steps=setting.warmup_steps),
        train=replace(usual.train, seed=seed, device="cpu"),
    )
    if side == OURS:
        config = replace(
            config,
            tables=replace(config.tables, optimizer=setting.tables, learning_rate=setting.tables_rate),
            dense=replace(config.dense, optimizer=setting.dense, learning_rate=setting.dense_rate),
        )
    return prepare(config, recipe, Ranks(0, 0, 1))


def _train_ours(inputs: Inputs) -> DistributedModelParallel:
    training = Training(inputs, iter(inputs.loader))
    for _ in range(len(inputs.loader)):
        training.step()
    return training.model


def _train_reference(inputs: Inputs, setting: Setting) -> nn.Module:
    config = inputs.config
    data = ReferenceData(
        features=inputs.manifest.features,
        num_dense=len(inputs.manifest.dense),
        longest=_longest_bags(config.data.uri),
    )
    model = build_reference(config.model, data, config.train.seed)
    tables = tables_of(model)
    of_tables = set(map(id, tables))
    dense = [each for each in model.parameters() if id(each) not in of_tables]
    optimizers = [
        (TABLE_OPTIMIZERS[name].make(parameters, lr=rate), rate)
        for name, rate, parameters in (
            (setting.tables, setting.tables_rate, tables),
            (setting.dense, setting.dense_rate, dense),
        )
    ]
    for step, batch in enumerate(inputs.loader):
        factor = schedule_factor(config.schedule, step)
        for optimizer, rate in optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = factor * rate
        loss = binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer, _ in optimizers:
            optimizer.step()
    return model


@cache
def _longest_bags(dataset: str) -> dict[str, int]:
    """Longest bag of each feature with bags of other sizes than 1, from all samples."""
    config = LoaderConfig(batch_size=4096, shuffle=False, drop_last=False)
    names = [feature.name for feature in read_manifest(dataset).features]
    shortest, longest = torch.ones(len(names)), torch.ones(len(names))
    with closing(DataLoader(dataset, config)) as loader:
        for batch in loader:
            lengths = batch.sparse.lengths().view(len(names), -1)[:, : batch.num_valid]
            shortest = torch.minimum(shortest, lengths.amin(1))
            longest = torch.maximum(longest, lengths.amax(1))
    return {
        name: int(most)
        for name, least, most in zip(names, shortest, longest, strict=True)
        if least != 1 or most != 1
    }
