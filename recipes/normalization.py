"""python recipes/normalization.py

Which normalisation survives a split batch? Trains a small convnet on handwritten digits under
{bn, deferred, sync, group} x {data-parallel, pipeline} x batch sizes x seeds, and prints a table of test
accuracies and a conclusion; the run directory keeps them with a plot. A quarter of an hour on two cores.

    python recipes/normalization.py seeds=[0] batch_sizes=[16,64] epochs=4

What is computed is what the ranks would compute, in one process: a batch split over devices is the sum of
its slices' weighted gradients, and a slice's BatchNorm sees nothing else. With 4 micro-batches that 2
members share:

    one device      [ . . . . . . . . ]                      statistics over N samples
    data-parallel   [ . ][ . ][ . ][ . ][ . ][ . ][ . ][ . ] 8 members, N/8 samples each
    pipeline        [ . | . ][ . | . ][ . | . ][ . | . ]     4 micro-batches, 2 members with N/8 samples each

"bn" is torch's BatchNorm; its running statistics are the first member's, which are the ones a checkpoint
holds. "sync" shares statistics among the members: over N samples when data-parallel (one device's result, to
1e-9 in the tests of this package), over a micro-batch of N/4 in the pipeline. "deferred" and "group" compute
the same under both splits, so those two are trained once and shown twice.
"""

import json
import math
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.nn.functional as F
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lightning_hetpipe.stage.batchnorm import commit_all
from lightning_hetpipe.stage.norm import convert_norm

REFERENCE = "sync, data-parallel"


@dataclass(frozen=True)
class Split:
    """How one batch reaches the BatchNorm layers."""

    policy: str  # of `convert_norm`
    slices: int  # into which the statistics see a batch fall apart
    recorded_every: int = 1  # every how many slices the running statistics of the first member see one


def splits(micro_batches: int, members: int) -> dict[str, Split]:
    """What is trained, by name."""
    slices = micro_batches * members
    return {
        "bn, data-parallel": Split("keep", slices, recorded_every=slices),
        "bn, pipeline": Split("keep", slices, recorded_every=members),
        "deferred": Split("deferred", slices),
        REFERENCE: Split("keep", 1),
        "sync, pipeline": Split("keep", micro_batches),
        "group": Split("group", 1),
    }


def rows(names: list[str]) -> Iterator[tuple[str, str, str]]:
    """The table's rows: policy, split, and the name of what was trained for them."""
    for policy in ("bn", "deferred", "sync", "group"):
        for split in ("data-parallel", "pipeline"):
            yield policy, split, policy if policy in names else f"{policy}, {split}"


def network(width: int) -> nn.Module:
    def block(channels_in: int, channels: int, stride: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(channels), nn.ReLU()]

    return nn.Sequential(
        *block(1, width, 1),
        *block(width, 2 * width, 2),
        *block(2 * width, 2 * width, 1),
        *block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def digits(seed: int, train_samples: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train and to test on, split by `seed`."""
    data = load_digits()
    images = torch.as_tensor(data.images, dtype=torch.float32)[:, None]
    images = (images - images.mean()) / images.std()
    labels = torch.as_tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[:train_samples], order[train_samples:]
    return images[train], labels[train], images[test], labels[test]


def backward_in_slices(model: nn.Module, split: Split, images: Tensor, labels: Tensor) -> None:
    """Leaves the gradient of the batch's mean loss, as the ranks of `split` would compute it."""
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for index, (x, y) in enumerate(
        zip(images.tensor_split(split.slices), labels.tensor_split(split.slices), strict=True)
    ):
        for layer in norms:
            layer.momentum = 0.1 if index % split.recorded_every == 0 else 0.0
        loss = F.cross_entropy(model(x), y)
        (loss * (len(y) / len(labels))).backward()
    commit_all(model)


def accuracy(job: tuple[str, Split, int, int, dict[str, Any]]) -> float:
    """Trains one network and returns its test accuracy in percent, normalised by its running statistics."""
    _, split, batch_size, seed, settings = job
    torch.set_num_threads(1)
    x, y, x_test, y_test = digits(seed, settings["train_samples"])
    torch.manual_seed(seed)
    model = convert_norm(network(settings["width"]), split.policy)
    steps_per_epoch = len(y) // batch_size
    lr = settings["lr"] * batch_size / 64
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, total_steps=settings["epochs"] * steps_per_epoch
    )
    for _ in range(settings["epochs"]):
        order = torch.randperm(len(y))[: steps_per_epoch * batch_size]
        for batch in order.split(batch_size):
            optimizer.zero_grad()
            backward_in_slices(model, split, x[batch], y[batch])
            optimizer.step()
            scheduler.step()
    with torch.no_grad():
        hits = model.eval()(x_test).argmax(1) == y_test
    return 100 * hits.float().mean().item()


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean, and its standard error over the seeds (infinite for one seed)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return statistics.fmean(values), error


def conclusion(found: dict[str, dict[int, list[float]]], names: list[str]) -> list[str]:
    """One sentence per row: where it differs, seed by seed, by more than three standard errors."""
    sentences = [f"Against BatchNorm over the whole batch on one device ({REFERENCE}), points of accuracy:"]
    for policy, split, name in rows(names):
        if name == REFERENCE:
            continue
        verdicts: dict[str, list[str]] = {}
        for size, values in found[name].items():
            pairs = zip(values, found[REFERENCE][size], strict=True)
            mean, error = mean_and_error([ours - whole for ours, whole in pairs])
            if math.isinf(error):
                verdict = "not decided by one seed"
            elif abs(mean) <= 3 * error:
                verdict = "equal within the spread"
            else:
                verdict = "worse" if mean < 0 else "better"
            verdicts.setdefault(verdict, []).append(f"N={size} ({mean:+.2f} ± {error:.2f})")
        told = [f"{verdict} at {', '.join(sizes)}" for verdict, sizes in verdicts.items()]
        sentences.append(f"{policy}, {split}: " + "; ".join(told) + ".")
    return sentences


def table(found: dict[str, dict[int, list[float]]], names: list[str], batch_sizes: list[int]) -> Table:
    result = Table(title="test accuracy in %, mean ± standard deviation over the seeds")
    for heading in ("policy", "split", *(f"N={size}" for size in batch_sizes)):
        result.add_column(heading)
    for policy, split, name in rows(names):
        cells = []
        for size in batch_sizes:
            values = found[name][size]
            spread = statistics.stdev(values) if len(values) > 1 else math.nan
            cells.append(f"{statistics.fmean(values):.2f} ± {spread:.2f}")
        result.add_row(policy, split, *cells)
    return result


def plot(found: dict[str, dict[int, list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, by_size in found.items():
        means, errors = zip(*(mean_and_error(values) for values in by_size.values()), strict=True)
        bars = errors if all(map(math.isfinite, errors)) else None
        axes.errorbar(list(by_size), means, bars, marker="o", capsize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("samples per batch, N")
    axes.set_ylabel("test accuracy, % (bars: standard error)")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


@hydra.main(version_base="1.3", config_path="../conf", config_name="normalization")
def main(config: DictConfig) -> None:
    settings: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    batch_sizes, seeds = settings["batch_sizes"], settings["seeds"]
    trained = splits(settings["micro_batches"], settings["members"])
    jobs = [
        (name, split, size, seed, settings)
        for size in sorted(batch_sizes)  # the slowest first
        for name, split in trained.items()
        for seed in seeds
    ]
    found: dict[str, dict[int, list[float]]] = {name: {size: [] for size in batch_sizes} for name in trained}
    with ProcessPoolExecutor(settings["workers"], mp_context=get_context("spawn")) as pool:
        for job, result in track(zip(jobs, pool.map(accuracy, jobs), strict=True), "training", len(jobs)):
            found[job[0]][job[2]].append(result)

    names = list(trained)
    console = Console()
    console.print(table(found, names, batch_sizes))
    sentences = conclusion(found, names)
    console.print("\n".join(sentences))
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    plot(found, run_dir / "accuracy.png")
    result = {"test_accuracy_percent": found, "seeds": seeds, "settings": settings, "conclusion": sentences}
    (run_dir / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(f"the run is in {run_dir}")


if __name__ == "__main__":
    main()
