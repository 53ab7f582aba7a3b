"""The command line: ``hetpipe profile | plan | compare | simulate | train``, with Hydra overrides.

hetpipe plan model=resnet18 cluster=lab4 batch_size=64
hetpipe plan -m micro_batch=2,4,8,16
hetpipe --help
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress

import lightning_hetpipe as hp
from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.errors import HetPipeError, PlanError
from lightning_hetpipe.planner.arguments import read_merge
from lightning_hetpipe.planner.baselines import Alone
from lightning_hetpipe.planner.candidates import Setting, finish
from lightning_hetpipe.planner.largest import largest_batch
from lightning_hetpipe.plans import Alternative, Plan
from lightning_hetpipe.profiles import Profile
from lightning_hetpipe.report import (
    comparison_table,
    largest_table,
    measured_table,
    plan_table,
    profile_table,
    show,
)
from lightning_hetpipe.report.sweep import CHOICE
from lightning_hetpipe.shipped import conf_dir
from lightning_hetpipe.timeline import gantts

Figures = dict[str, float]
_PLANNED = ("cluster", "batch_size", "micro_batch", "schedule", "merge")  # a plan has its own
_MEASURED = 64  # samples of the batch that is measured when the largest one is asked for


def main() -> None:
    """Runs one command; exits with 2 and one line when it cannot be done."""
    words = [word for word in sys.argv[1:] if word in COMMANDS]
    if not words:
        if not {"--help", "-h"} & set(sys.argv[1:]):
            sys.exit(f"hetpipe: say what to do: hetpipe {' | '.join(COMMANDS)} (or --help)")
        words = ["plan"]
    else:
        sys.argv.remove(words[0])
    command = COMMANDS[words[0]]

    def task(config: DictConfig) -> Figures:
        try:
            return command(config)
        except InstantiationException as error:
            cause = error.__cause__ or error
            print(f"hetpipe {words[0]}: {_one_line(f'the model cannot be built: {cause}')}", file=sys.stderr)
        except HetPipeError as error:
            print(f"hetpipe {words[0]}: {error}", file=sys.stderr)
        raise SystemExit(2)

    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="hetpipe")(task)()


def profile_command(config: DictConfig) -> Figures:
    """Measures every layer on every device."""
    profile = _profile(config, _cluster(config))
    _show(config, profile.to_json(), lambda: [profile_table(profile)])
    return {}


def plan_command(config: DictConfig) -> Figures:
    """Cuts the model, and says why there."""
    if config.batch_size == "max" and config.plan is None:
        return _largest(config)
    plan, profile = _plan(config)
    assert plan.prediction is not None
    others = comparison_table(plan.alternatives, bound=plan.prediction.images_per_s_bound)
    _show(config, plan.to_json(), lambda: [plan_table(plan), others, *_origin(profile)])
    figures: Figures = {"micro_batch": plan.micro_batch}
    if HydraConfig.get().mode == RunMode.MULTIRUN and config.plan is None:
        figures[CHOICE] = _make(
            config, profile, plan.cluster, micro_batch="auto", baselines=False
        ).micro_batch
    return figures | {
        "stages": len(plan.stages),
        "images_per_s": plan.prediction.images_per_s,
        "step_s": plan.prediction.step_s,
    }


def _largest(config: DictConfig) -> Figures:
    """The plan of the largest batch, beside the largest of plain GPipe on an even split."""
    if not isinstance(_merge(config), str):
        raise PlanError(f"batch_size=max is of devices apart: leave merge={config.merge} out")
    cluster = _cluster(config)
    found = largest_batch(
        _profile(config, cluster),
        cluster,
        micro_batch=config.micro_batch,
        schedule=config.schedule,
        optimizer_copies=config.optimizer_copies,
    )
    _show(
        config, found.plan.to_json(), lambda: [plan_table(found.plan), largest_table(found.plan, found.even)]
    )
    figures = {"batch_size": float(found.plan.batch_size), "micro_batch": float(found.plan.micro_batch)}
    if found.even is None or found.gain is None:
        return figures
    return figures | {"batch_size_even": float(found.even.batch_size), "gain": found.gain}


def compare_command(config: DictConfig) -> Figures:
    """Puts the plan beside every alternative."""
    if config.batch_size == "max":
        raise PlanError("batch_size=max is a question for `hetpipe plan`: give compare a number")
    cluster = _cluster(config)
    profile = _profile(config, cluster)
    rows: list[Alternative] = list(
        hp.compare(
            profile,
            cluster,
            config.batch_size,
            micro_batch=config.micro_batch,
            schedule=config.schedule,
            merge=_merge(config),
            optimizer_copies=config.optimizer_copies,
        )
    )
    text = json.dumps([asdict(row) for row in rows], indent=1)
    title = f"{config.model.name} on {cluster.name}, batch {config.batch_size}"
    bound = rows[-1].images_per_s
    _show(config, text, lambda: [comparison_table(rows, title, bound=bound), *_origin(profile)])
    return {row.name: row.images_per_s for row in rows}


def simulate_command(config: DictConfig) -> Figures:
    """Draws one step of the plan."""
    plan, profile = _plan(config)
    timeline = hp.simulate(plan, profile)
    text = json.dumps({"step_s": timeline.step_s, "busy": timeline.busy, **asdict(timeline)}, indent=1)
    picture = timeline.gantt(max(40, Console().width - 16))
    _show(config, text, lambda: [plan_table(plan), picture, *_origin(profile)])
    return {"step_s": timeline.step_s}


def train_command(config: DictConfig) -> Figures:
    """Runs the plan on this machine with random samples, predicted beside measured."""
    from lightning_hetpipe.trial import train_on_random_samples

    plan, profile = _plan(config)
    predicted = hp.simulate(plan, profile)
    assert plan.prediction is not None
    trial = train_on_random_samples(
        _module(config),
        _shapes(config),
        int(config.model.classes),
        plan,
        int(config.steps),
        progress_bar=config.format != "json",
    )
    measured = trial.timeline
    figures = {"step_s_predicted": plan.prediction.step_s, "step_s_measured": trial.step_s}
    picture = gantts([predicted, measured], max(40, Console().width - 16))
    _show(
        config,
        json.dumps(figures, indent=1),
        lambda: [plan_table(plan), picture, measured_table(plan, predicted, measured)],
    )
    return figures


COMMANDS: Mapping[str, Callable[[DictConfig], Figures]] = {
    "profile": profile_command,
    "plan": plan_command,
    "compare": compare_command,
    "simulate": simulate_command,
    "train": train_command,
}


def _cluster(config: DictConfig) -> Cluster:
    return Cluster.from_mapping(OmegaConf.to_container(config.cluster, resolve=True))  # type: ignore[arg-type]


def _merge(config: DictConfig) -> Any:
    merge = config.merge
    return read_merge(OmegaConf.to_container(merge) if isinstance(merge, ListConfig) else merge)


def _shapes(config: DictConfig) -> list[tuple[int, ...]]:
    return [tuple(shape) for shape in config.model.inputs]


def _module(config: DictConfig) -> Any:
    return hydra.utils.instantiate(config.model.module)


def _profile(config: DictConfig, cluster: Cluster) -> Profile:
    """From a file, from published figures, or measured here."""
    if config.profile not in ("auto", "analytic"):
        return Profile.load(config.profile)
    import torch

    n_samples = _MEASURED if config.batch_size == "max" else int(config.batch_size)
    example = tuple(torch.randn(n_samples, *shape) for shape in _shapes(config))
    origin: Literal["measured", "analytic"] = "measured" if config.profile == "auto" else "analytic"
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring")

        def advance(device: str, done: int, total: int) -> None:
            bar.update(task, description=f"measuring {device}", completed=done, total=total)

        merge = _merge(config) != "never"
        return hp.profile(_module(config), example, cluster, origin=origin, merge=merge, progress=advance)


def _plan(config: DictConfig) -> tuple[Plan, Profile]:
    if config.plan is not None:
        _refuse_beside_plan()
        plan = Plan.load(config.plan)
        profile = _profile(config, plan.cluster)
        return _predicted(config, plan, profile), profile
    cluster = _cluster(config)
    profile = _profile(config, cluster)
    return _make(config, profile, cluster, micro_batch=config.micro_batch), profile


def _refuse_beside_plan() -> None:
    """Refuses what a plan brings itself."""
    asked = {each.partition("=")[0].lstrip("+") for each in HydraConfig.get().overrides.task}
    named = [each for each in _PLANNED if any(key.partition(".")[0] == each for key in asked)]
    if named:
        raise PlanError(
            f"plan= and {', '.join(named)} were both asked for, but a plan has its own: leave one out"
        )


def _predicted(config: DictConfig, plan: Plan, profile: Profile) -> Plan:
    """The plan with what it says of itself, or what the profile says of one that was written by hand."""
    plan.check_graph(profile.graph)
    if plan.prediction is not None:
        return plan
    setting = Setting(profile, plan.cluster, plan.batch_size, (plan.schedule,), config.optimizer_copies)
    return finish(setting, plan, Alone(setting).bound_images_per_s())


def _make(config: DictConfig, profile: Profile, cluster: Cluster, **options: Any) -> Plan:
    return hp.plan(
        profile,
        cluster,
        config.batch_size,
        schedule=config.schedule,
        merge=_merge(config),
        optimizer_copies=config.optimizer_copies,
        **options,
    )


def _origin(profile: Profile) -> list[str]:
    """A warning beside figures that nobody measured."""
    if profile.origin == "measured":
        return []
    return [f"{profile.origin} profile: from published peaks of the devices; nothing was measured"]


def _show(config: DictConfig, as_json: str, as_text: Callable[[], list[Any]]) -> None:
    if config.out is not None:
        Path(config.out).write_text(as_json + "\n", encoding="utf-8")
    if config.format == "json":
        print(as_json)
        return
    show(*as_text())


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
