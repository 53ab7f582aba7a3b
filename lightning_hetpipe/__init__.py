"""Trains an unmodified LightningModule as a pipeline over devices that are not alike.

    import lightning_hetpipe
    Trainer(strategy="hetpipe", devices=4).fit(model, data)

Vocabulary, one word per thing:

* device, link, cluster: one worker's processor; a directed path between two devices; all of them.
* layer, cut: the smallest cuttable unit of the traced model; a place between two layers.
* stage, group, share: a run of layers held together; the devices that hold it; each device's fraction.
* split: how a group shares its stage: ``none`` (one device), ``channel``, ``batch``.
* micro-batch: one slice of the batch; slices may differ in size; ``n_i / N`` is its weight.
* action, schedule: ``2F0`` is the forward of micro-batch 0 on stage 2; per rank, the ordered list of actions.
* profile: measured seconds and bytes per device, layer and micro-batch size, and per link.
* plan: cluster, cuts, groups, shares, micro-batch size, schedule and prediction; a JSON value.
* timeline: what happened when, simulated or measured.
* replica: one whole pipeline among several that train data-parallel.
* reader: rank 0's user step, suspended where it calls the pipelined module.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_hetpipe.strategy.registry import register

if TYPE_CHECKING:
    from lightning_hetpipe.callbacks import PipelineStatsMonitor
    from lightning_hetpipe.cluster import Cluster, Device, Emulation, Link
    from lightning_hetpipe.engine.survey import profile
    from lightning_hetpipe.errors import HetPipeError
    from lightning_hetpipe.planner.comparison import compare
    from lightning_hetpipe.planner.search import make_plan as plan
    from lightning_hetpipe.planner.simulate import simulate
    from lightning_hetpipe.plans import Plan
    from lightning_hetpipe.profiles import Profile
    from lightning_hetpipe.stage.norm import convert_norm
    from lightning_hetpipe.strategy.hetpipe import HetPipeStrategy
    from lightning_hetpipe.timeline import Timeline

__version__ = "0.1.0"

# Public names and the modules that hold them (and the name there, if it differs);
# loaded on first use, so that planning needs no torch.
_HOME = {
    "Cluster": "cluster",
    "Device": "cluster",
    "Emulation": "cluster",
    "Link": "cluster",
    "HetPipeError": "errors",
    "HetPipeStrategy": "strategy.hetpipe",
    "PipelineStatsMonitor": "callbacks",
    "Plan": "plans",
    "Profile": "profiles",
    "Timeline": "timeline",
    "compare": "planner.comparison",
    "convert_norm": "stage.norm",
    "plan": "planner.search:make_plan",
    "profile": "engine.survey",
    "simulate": "planner.simulate",
}

__all__ = [
    "Cluster",
    "Device",
    "Emulation",
    "HetPipeError",
    "HetPipeStrategy",
    "Link",
    "PipelineStatsMonitor",
    "Plan",
    "Profile",
    "Timeline",
    "compare",
    "convert_norm",
    "plan",
    "profile",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, known_as = _HOME[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), known_as or name)


register()
