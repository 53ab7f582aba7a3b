"""python recipes/merging.py cluster=whimpy5 model=vgg11

Should slow devices be kept apart, share a stage, or be left out? Plans all three, and what the planner does
when left to itself ("auto"), runs them a few steps at a time and in turn, and prints predicted beside
measured images per second; "beside keep" is the median over the rounds. Settings: conf/merging.yaml.
"""

import json
from pathlib import Path

import hydra
import torch
from bench import profile as measure
from bench import run_in_turn
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import nn
from warm import warm_processors

import lightning_hetpipe as hp
from lightning_hetpipe.errors import HetPipeError
from lightning_hetpipe.report import show
from lightning_hetpipe.text import align

COLUMNS = ("", "stages", "micro-batch", "images/s predicted", "measured", "ratio", "beside keep predicted",
           "measured")  # fmt: skip


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
    """The best plan with the teams apart, of those with each team in one stage, without them, and of all."""
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
    return plans | {"auto": hp.plan(profile, cluster, config.batch_size, **options)}


def run(config: DictConfig, network: nn.Module, cluster: hp.Cluster) -> dict[str, dict[str, float]]:
    """Predicted and measured images per second by plan; the plans take turns, equal ones as one."""
    shapes = [tuple(shape) for shape in config.model.inputs]
    profile = measure(network, shapes, cluster, config.batch_size)
    plans = make_plans(config, profile, cluster)
    for name, plan in plans.items():
        show(f"{name}\n{plan.table()}\nwhy: {plan.why()}\n")
    everything = list(plans.values())
    measured = run_in_turn(network, shapes, config.model.classes, everything, config.rounds, config.steps)
    keep_s = plans["keep"].prediction.step_s
    return {
        name: {
            "stages": len(plan.stages),
            "micro_batch": plan.micro_batch,
            "predicted": plan.prediction.images_per_s,
            "measured": config.batch_size / each.step_s,
            "ratio": plan.prediction.step_s / each.step_s,
            "beside_keep_predicted": keep_s / plan.prediction.step_s,
            "beside_keep": 1 / each.ratio,
        }
        for (name, plan), each in zip(plans.items(), measured)
    }


@hydra.main(version_base="1.3", config_path="../conf", config_name="merging")
def main(config: DictConfig) -> None:
    torch.set_num_threads(1)  # no thread pool may exist before a fork
    torch.manual_seed(0)
    cluster = hp.Cluster.from_mapping(OmegaConf.to_container(config.cluster, resolve=True))
    with warm_processors():
        figures = run(config, hydra.utils.instantiate(config.model.module), cluster)
    rows = [(name, *(f"{figure:.4g}" for figure in each.values())) for name, each in figures.items()]
    show(align(COLUMNS, rows))
    folder = Path(HydraConfig.get().runtime.output_dir)
    (folder / "result.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
