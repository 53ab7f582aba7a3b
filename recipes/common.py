"""What every recipe does around its model: choose devices, train, show and keep what happened."""

import json
import warnings
from pathlib import Path

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import lightning_hetpipe as hp
from lightning_hetpipe.report import measured_table, save_gantt, show
from lightning_hetpipe.timeline import chrome_trace, gantts


def train(config: DictConfig, module: L.LightningModule) -> dict[str, float]:
    """Trains ``module`` on ``config.cluster`` and returns the run's main numbers.

    The run directory receives ``result.json``, ``timeline.json`` and ``gantt.png``, next to the
    ``plan.json`` and ``profile.json`` of the strategy.
    """
    torch.set_num_threads(1)  # every emulated device has one; and no thread pool may exist before a fork
    # Lightning 2.6 asks torch's pytree in the old way, and torch says so once per process.
    warnings.filterwarnings("ignore", message=r".*LeafSpec", category=FutureWarning)
    L.seed_everything(config.seed, verbose=False)
    cluster = hp.Cluster.from_mapping(OmegaConf.to_container(config.cluster, resolve=True))
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    strategy = hp.HetPipeStrategy(
        cluster=cluster, run_dir=run_dir, **OmegaConf.to_container(config.hetpipe, resolve=True)
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=len(cluster.devices),
        max_epochs=config.max_epochs,
        callbacks=[hp.PipelineStatsMonitor()],
        enable_progress_bar=config.progress_bar,
        default_root_dir=run_dir,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(module, hydra.utils.instantiate(config.data))
    return keep(trainer, run_dir, config.schedule)


def keep(trainer: L.Trainer, run_dir: Path, schedule: str) -> dict[str, float]:
    """Prints predicted beside measured, writes the run's files, and returns its main numbers."""
    plan, measured = trainer.strategy.plan, trainer.strategy.timeline
    profile = trainer.strategy.profile
    predicted = hp.simulate(plan, profile)
    show(gantts([predicted, measured]), measured_table(plan, predicted, measured))
    ranks = [rank for ranks in plan.ranks_of_stage for rank in ranks]
    auto = hp.plan(profile, plan.cluster, plan.batch_size, schedule=schedule, baselines=False)
    figures = {
        "micro_batch": plan.micro_batch,
        "micro_batch_auto": auto.micro_batch,  # before it is refined by measurements
        "val_acc": float(trainer.callback_metrics["val_acc"]),
        "images_per_s": float(trainer.callback_metrics["hetpipe/images_per_s"]),
        "images_per_s_predicted": plan.prediction.images_per_s,
        "step_s_measured": float(trainer.callback_metrics["hetpipe/step_s"]),
        "step_s_predicted": plan.prediction.step_s,
        "images_per_s_bound": plan.prediction.images_per_s_bound,
        "bubble": 1 - sum(measured.busy[rank] for rank in ranks) / len(ranks),
        "memory_mib": max(measured.peak_memory_bytes) / 2**20,
    }
    (run_dir / "timeline.json").write_text(json.dumps(chrome_trace([predicted, measured])), encoding="utf-8")
    save_gantt([predicted, measured], run_dir / "gantt.png", [d.name for d in plan.cluster.devices])
    result = {
        **figures,
        "plan": json.loads(plan.to_json()),
        "peak_memory_bytes": list(measured.peak_memory_bytes),
    }
    (run_dir / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(f"validation accuracy {figures['val_acc']:.3f}; the run is in {run_dir}")
    return figures
