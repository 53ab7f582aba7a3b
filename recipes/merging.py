"""python recipes/merging.py cluster=whimpy5 model=vgg11

Should slow devices be kept apart, share a stage, or be left out? Plans all three, runs them in turn, and
prints predicted beside measured images per second. Settings: conf/merging.yaml.
"""

import json
import statistics
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import nn

import lightning_hetpipe as hp
from lightning_hetpipe.errors import HetPipeError
from lightning_hetpipe.report import show
from lightning_hetpipe.text import align
from lightning_hetpipe.trial import train_on_random_samples

COLUMNS = ("", "stages", "micro-batch", "images/s predicted", "measured", "ratio")


def slowest_kind(cluster: hp.Cluster, profile: hp.Profile) -> list[str]:
    """All devices of the slowest kind of which there are several."""
    kinds: dict[object, list[str]] = {}
    for device in cluster.devices:
        kinds.setdefault(device.kind_key, []).append(device.name)

    def seconds(names: list[str]) -> float:
        tables = profile.device(names[0]).layer_seconds(profile.device(names[0]).micro_batches[-1])
        return float(sum(table.sum() for table in tables))

    several = [names for names in kinds.values() if len(names) > 1]
    if not several:
        raise SystemExit(f"cluster {cluster.name} has no two devices of one kind: say teams=[[a,b]]")
    return max(several, key=seconds)


def make_plans(config: DictConfig, profile: hp.Profile, cluster: hp.Cluster) -> dict[str, hp.Plan]:
    """The best plan with the teams apart, of those with each team in one stage, and without them."""
    teams = OmegaConf.to_container(config.teams) if config.teams else [slowest_kind(cluster, profile)]
    members = {name for team in teams for name in team}
    options = {"micro_batch": config.micro_batch, "schedule": config.schedule, "baselines": False}
    plans = {
        "keep": hp.plan(profile, cluster, config.batch_size, merge="never", **options),
        f"merge {', '.join('+'.join(team) for team in teams)}": hp.plan(
            profile, cluster, config.batch_size, merge=teams, **options
        ),
    }
    others = tuple(device.name for device in cluster.devices if device.name not in members)
    if others:
        rest = cluster.subset(others)
        try:
            plans["drop"] = hp.plan(profile, rest, config.batch_size, merge="never", **options)
        except HetPipeError as error:
            show(f"without {', '.join(sorted(members))}: {error}")
    return plans


def run(config: DictConfig, network: nn.Module, cluster: hp.Cluster) -> dict[str, dict[str, float]]:
    """Predicted and measured images per second by plan; the plans take turns."""
    shapes = [tuple(shape) for shape in config.model.inputs]
    example = tuple(torch.randn(config.batch_size, *shape) for shape in shapes)
    profile = hp.profile(network, example, cluster)
    plans = make_plans(config, profile, cluster)
    for name, plan in plans.items():
        show(f"{name}\n{plan.table()}\nwhy: {plan.why()}\n")
    chosen = hp.plan(profile, cluster, config.batch_size, baselines=False)
    show(f"left to itself, the planner says: {chosen.why()}\n")
    measured: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(config.rounds):
        for name, plan in plans.items():
            trial = train_on_random_samples(network, shapes, config.model.classes, plan, config.steps)
            measured[name].append(config.batch_size / trial.step_s)
    figures = {}
    for name, plan in plans.items():
        predicted, found = plan.prediction.images_per_s, statistics.median(measured[name])
        figures[name] = {
            "stages": len(plan.stages),
            "micro_batch": plan.micro_batch,
            "predicted": predicted,
            "measured": found,
            "ratio": found / predicted,
        }
    return figures


@hydra.main(version_base="1.3", config_path="../conf", config_name="merging")
def main(config: DictConfig) -> None:
    torch.set_num_threads(1)  # no thread pool may exist before a fork
    torch.manual_seed(0)
    cluster = hp.Cluster.from_mapping(OmegaConf.to_container(config.cluster, resolve=True))
    figures = run(config, hydra.utils.instantiate(config.model.module), cluster)
    rows = [(name, *(f"{figure:.4g}" for figure in each.values())) for name, each in figures.items()]
    show(align(COLUMNS, rows))
    folder = Path(HydraConfig.get().runtime.output_dir)
    (folder / "result.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
