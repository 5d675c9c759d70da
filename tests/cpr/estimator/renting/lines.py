"""Made-up lines of `metrics.jsonl`, as runs with `train.measure_scaling` write them."""

import json

from cpr.estimator.renting.noise import GradientNoise
from cpr.estimator.renting.traffic import Traffic

TRAFFIC = Traffic(dense_bytes=2e6, pooled_bytes=3_000.0)
LINK = 125e6
"""1 Gb/s."""
NOISE_SCALE = 800.0


def noise(workers, batch, steps=500, squared_norm=0.25, scale=NOISE_SCALE):
    """Norms whose expected values have that noise scale."""
    trace = scale * squared_norm
    local, averaged = (squared_norm + trace * each for each in (workers / batch, 1 / batch))
    return GradientNoise(workers=workers, batch=batch, steps=steps, local=local, averaged=averaged)


def seconds(workers, batch, link=LINK):
    """A step that follows the model: 10 ms, 20 us a sample, 1 ms a further worker, 2 ns a byte."""
    sent = TRAFFIC.sent(workers, batch)
    exchange = (workers > 1) * (0.001 * (workers - 1) + (2e-9 + 1 / link) * sent)
    return 0.01 + 2e-5 * batch / workers + exchange


def run_lines(workers, batch, curve=(), rates=None, **noise_options):
    """Lines of a run; its first rate is wrong, as while memory is allocated."""
    rate = batch / seconds(workers, batch)
    scaling = {"kind": "scaling", "workers": workers, "global_batch": batch, "dense_bytes": 2_000_000}
    if workers > 1:
        measured = noise(workers, batch, **noise_options)
        figures = {name: getattr(measured, name) for name in ("steps", "local", "averaged")}
        scaling |= {"pooled_bytes": 3_000.0, "link_bytes_per_s": LINK, "noise": figures}
    lines = [{"kind": "hyperparameters"}]
    for each in rates or (rate / 7, rate, rate, rate):
        lines += [{"kind": "train", "samples_per_s": each}, scaling]
    return lines + [{"kind": "evaluation", "samples": samples, "auc": auc} for samples, auc in curve]


CONFIG = {
    "model": {"kind": "dlrm", "embedding_dim": 16},
    "train": {"precision": "fp32", "max_steps": 100},
    "comm": {"exchange": "dense"},
}
DATA = {"features": [{"name": "cat_0", "rows": 10}], "label": "label"}


def write_run(folder, *arguments, config=CONFIG, data=DATA, **options):
    """A run's folder with these lines; returns its name."""
    folder.mkdir()
    for name, content in (("config", config), ("data", data)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    lines = run_lines(*arguments, **options)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(folder)
