"""The strategy: what Lightning calls, in the order in which it calls it.

Trainer(...)     options, launcher                              nothing is started
launch           wrong input is refused, then processes start
setup            one batch is peeked at, the module traced, measured, planned, cut into stages
training_step    the whole schedule; the loss it returns installs the gradients
*_step           the user's step on rank 0, its module calls run by all ranks
teardown         whole weights again, on every rank
"""

import itertools
import logging
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.engine.c10d import PrefixStore
from lightning_hetpipe.engine.session import Engine
from lightning_hetpipe.errors import UnsupportedError
from lightning_hetpipe.planner.arguments import read_merge
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.profiles import Profile
from lightning_hetpipe.stage.norm import convert_norm
from lightning_hetpipe.strategy.capture import Capture, capture_from_loader, capture_from_step
from lightning_hetpipe.strategy.data import for_this_rank
from lightning_hetpipe.strategy.devices import refuse_autocast_across_kinds, stand_ins, take_device
from lightning_hetpipe.strategy.exchange import Exchange
from lightning_hetpipe.strategy.options import (
    Norm,
    Options,
    SplitByHand,
    read_cluster,
    read_micro_batch,
    read_plan,
    read_profile,
    read_run_dir,
)
from lightning_hetpipe.strategy.partition import OwnerMap
from lightning_hetpipe.strategy.pipeline import Pipeline
from lightning_hetpipe.strategy.pipelined import find_pipelined, refuse_one_layer
from lightning_hetpipe.strategy.precision import check_optimizers
from lightning_hetpipe.strategy.prepare import Run, prepare
from lightning_hetpipe.strategy.progress import has_bar
from lightning_hetpipe.strategy.refusals import refuse_callbacks, refuse_module, refuse_optimizers
from lightning_hetpipe.strategy.shadows import Shadows, adapt
from lightning_hetpipe.strategy.sigterm import Sigterm
from lightning_hetpipe.strategy.together import Together
from lightning_hetpipe.timeline import Timeline

log = logging.getLogger(__name__)

_JOINED = itertools.count()  # strategies of this process that joined a world; equal on all ranks


class PipelineStrategy(Together):
    """All of `HetPipeStrategy` but the Lightning namespace, which a subclass adds.

    Args:
        cluster: A `Cluster`, a mapping, a YAML file or the name of a shipped cluster; None to find the
            devices at start. It decides each rank's device; one with several kinds of device, or with
            ranks that share a GPU, also decides how many processes there are.
        module: Dotted name of the pipelined submodule; ``auto`` takes the child that holds nearly all
            parameters, else the LightningModule's own ``forward``.
        plan: A `Plan`, a mapping or a file: neither profiles nor plans; refused if it belongs to another
            model. ``even``, or ``{"cuts": [layer names], "devices": [names]}``, gives the stages only; a list
            of names among the devices is a group.
        micro_batch: Samples per micro-batch, or ``auto``.
        schedule: ``gpipe``, ``1f1b``, ``interleaved`` (devices hold several stages) or ``auto``.
        merge: ``auto`` lets devices share a stage where that pays, ``never`` does not; or lists of devices,
            each of which must share one.
        norm: What BatchNorm does with micro-batches: ``keep``, ``deferred``, ``sync``, ``group``, ``freeze``.
        loss_reduction: How the user's loss reduces over samples: ``mean`` or ``sum``.
        start_method: ``popen``, ``fork`` or ``spawn``; without effect under torchrun or SLURM.
        timeout_s: A rank that others wait for longer than this counts as lost.
        profile: A `Profile` or a file: skips measuring.
        run_dir: Where plan and profile are written; nowhere if None.
        blocks: Dotted name of a sequence of blocks, for a module that does not trace.
        checkpoint: ``file`` is one ordinary Lightning checkpoint; ``directory``, for a model too large for
            rank 0, has every rank write its part.
        refine: Whether a plan whose micro-batch was chosen by ``auto`` is compared, in the first full batches
            of a fit, with its neighbours: other schedules, and other micro-batch sizes where those train the
            same (no BatchNorm that sees micro-batches, no random numbers). The fastest goes on.
    """

    is_distributed = True
    namespace: ClassVar[str]
    subprocess_launcher: ClassVar[type[Any]]
    process_launcher: ClassVar[type[Any]]

    def __init__(
        self,
        cluster: Cluster | dict[str, Any] | str | Path | None = None,
        module: str = "auto",
        plan: Plan | dict[str, Any] | str | Path | None = None,
        micro_batch: int | str = "auto",
        schedule: str = "auto",
        merge: str | Sequence[Sequence[str]] = "auto",
        norm: Norm = "keep",
        loss_reduction: str = "mean",
        start_method: str = "popen",
        timeout_s: float = 300.0,
        profile: Profile | str | Path | None = None,
        run_dir: str | Path | None = None,
        blocks: str | None = None,
        checkpoint: str = "file",
        refine: bool = True,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        self._pl_module: Any = None
        wanted = read_plan(plan)
        self.options = Options(
            cluster=read_cluster(cluster),
            plan=wanted if isinstance(wanted, Plan) else None,
            split=wanted if isinstance(wanted, SplitByHand) else None,
            profile=read_profile(profile),
            module=module,
            micro_batch=read_micro_batch(micro_batch),
            schedule=schedule,
            merge=read_merge(merge),
            norm=norm,
            loss_reduction=loss_reduction,
            start_method=start_method,
            checkpoint=checkpoint,
            refine=refine,
            timeout_s=timeout_s,
            run_dir=read_run_dir(run_dir),
            blocks=blocks,
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices or stand_ins(self.options.known_cluster),
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.num_nodes = 1
        self._engine: Engine | None = None
        self._group: Any = None
        self._exchange: Exchange | None = None
        self._pipeline: Pipeline | None = None
        self._shadows = Shadows()
        self._plan: Plan | None = self.options.plan
        self._profile: Profile | None = None
        self._timeline: Timeline | None = None

    # What the run was like

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before it is made."""
        return self._plan

    @property
    def profile(self) -> Profile | None:
        """What the plan was made from; None before that, and for a plan that came without one."""
        return self._profile

    @property
    def timeline(self) -> Timeline | None:
        """The last measured training step over all ranks; None before there is one."""
        return self._timeline

    def report(self) -> bytes:
        """Plan, profile and timeline, as a forked rank 0 hands them to the process that started it."""
        return pickle.dumps((self._plan, self._profile, self._timeline))

    def take_report(self, report: bytes) -> None:
        """The inverse of `report`."""
        self._plan, self._profile, self._timeline = pickle.loads(report)
        if self.options.norm == "group" and self._plan is not None:
            # The weights that came back are GroupNorm's; a BatchNorm here would take them for its own.
            assert self.lightning_module is not None
            convert_norm(find_pipelined(self.lightning_module, self.options.module)[1], "group")

    # Processes

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @property
    def _lightning_module(self) -> Any:
        return self._pl_module

    @_lightning_module.setter
    def _lightning_module(self, module: Any) -> None:
        # torch.compile of a whole LightningModule cannot follow its layers to other ranks; the Trainer
        # would refuse it before any hook of ours runs.
        if getattr(module, "_compiler_ctx", None) is not None:
            module = import_module(f"{self.namespace}.utilities.compile").to_uncompiled(module)
            log.warning("the LightningModule is compiled; its stages run without torch.compile")
        self._pl_module = module

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        if environment.creates_processes_externally:
            return
        if self.num_nodes > 1:
            raise UnsupportedError(
                f"num_nodes={self.num_nodes} was asked for, but nothing here starts processes on other "
                "machines: start the script with torchrun or SLURM, which may give each node its own number "
                "of devices"
            )
        self.set_world_ranks()
        if self.num_processes == 1:
            return
        if self.options.start_method == "popen":
            launcher = self.subprocess_launcher(environment, self.num_processes, 1)
            launcher.check = self.check
            self._launcher = launcher
        else:
            self._launcher = self.process_launcher(self, start_method=self.options.start_method)

    def set_world_ranks(self) -> None:
        """Global ranks of the processes of this node; torchrun and SLURM know theirs and ignore this.

        Without them, a process that was started by hand on each node says its place in ``NODE_RANK`` and
        ``LOCAL_RANK``, as Lightning has it.
        """
        environment = self.cluster_environment
        if environment is not None:
            node = environment.node_rank() if self.num_nodes > 1 else 0
            environment.set_global_rank(node * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        for module in ("lightning_utilities.core.rank_zero", f"{self.namespace}.utilities.rank_zero"):
            import_module(module).rank_zero_only.rank = self.global_rank

    def check(self, trainer: Any) -> None:
        """Refuses what cannot work, before a process is started.

        Raises:
            HetPipeError: Of the kind that fits.
        """
        self.options.check_world(self.world_size)
        refuse_autocast_across_kinds(self.precision_plugin, self.options.known_cluster)
        module = self.lightning_module
        assert module is not None
        refuse_module(module)
        refuse_callbacks(trainer.callbacks)
        if not any(self._is_overridden(hook, module) for hook in ("configure_model", "setup")):
            refuse_one_layer(module, *find_pipelined(module, self.options.module))

    def setup_environment(self) -> None:
        module = self.lightning_module
        assert module is not None
        self.set_world_ranks()
        self.check(module.trainer)
        take_device(self)
        super().setup_environment()
        # One reader needs no distributed sampler: the order is that of a single device.
        module.trainer._accelerator_connector.use_distributed_sampler = False
        if self._engine is None:
            self._engine = self._join()
            Finalize(None, self._engine.close, exitpriority=0)
        self._exchange = Exchange(self._engine.control)

    def _join(self) -> Engine:
        timeout_s, store = self.options.timeout_s, None
        if self.world_size > 1:
            import_module("lightning.fabric.utilities.distributed")._init_dist_connection(
                self.cluster_environment, "gloo", timeout=timedelta(seconds=timeout_s)
            )
            # Under a name of its own: a script may train with one Trainer after the other.
            name = f"strategy{next(_JOINED)}"
            store = PrefixStore(name, dist.distributed_c10d._get_default_store())
        agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        engine = Engine(
            store,
            self.global_rank,
            self.world_size,
            timeout_s=timeout_s,
            cluster=self.options.known_cluster,
            device=self.root_device,
            store_rank=None if agent_serves else 0,
        )
        if self.world_size > 1:
            with engine.control.joining("strategy"):
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return engine

    # Set-up and tear-down of a run

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._reset_optimizers_and_schedulers()
        adapt(self._shadows, trainer, self.exchange.leads)
        if trainer.state.fn == "fit":
            with self.exchange.blaming():
                capture = capture_from_loader(trainer, self)
                if capture is not None:
                    self._prepare(capture)
                self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        assert self._engine is not None
        trainer._signal_connector._sigterm_notifier_fn = Sigterm(self._engine.control, trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        refuse_optimizers(self.optimizers, shared_by_channels=bool(self._owners().shards))
        check_optimizers(self.precision_plugin, self.optimizers)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Models are built on the CPU; each rank's device gets its own stage only."""
        with torch.device("cpu"), self.precision_plugin.tensor_init_context():
            yield

    def _prepare(self, capture: Capture) -> Pipeline:
        assert self._engine is not None
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        run = Run(
            module=self.lightning_module,
            callbacks=trainer.callbacks,
            precision=self.precision_plugin,
            options=self.options,
            engine=self._engine,
            exchange=self.exchange,
            group=self._group,
            trains=trainer.state.fn == "fit",
            gradient_copies=int(trainer.accumulate_grad_batches > 1),
            is_overridden=self._is_overridden,
            show_progress=has_bar(trainer),
        )
        self._pipeline = prepare(run, capture, self._plan)
        self._plan = self._pipeline.plan
        self._profile = self._pipeline.profile or self._profile
        self.model_to_device()
        return self._pipeline

    def teardown(self) -> None:
        if self._pipeline is not None:
            with self.exchange.blaming():
                self._pipeline.close(whole=not self._is_interrupted())
            self._pipeline = None
        self._shadows.lift()
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        if self._engine is not None:
            self._engine.control.fail(exception)

    # Data

    def process_dataloader(self, dataloader: object) -> object:
        return for_this_rank(dataloader, self.exchange)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.exchange.leads:
            return super().batch_to_device(batch, device, dataloader_idx)
        return batch

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._pipeline is not None
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        scaler = getattr(self.precision_plugin, "scaler", None)
        accumulate = trainer.accumulate_grad_batches
        factor = (1.0 if scaler is None else float(scaler.get_scale())) / accumulate
        free_previous = self._zeroes_next(trainer, accumulate)
        loss = self._pipeline.train(args, kwargs, factor, free_previous=free_previous)
        if self._plan is not self._pipeline.plan:
            self._plan = self._pipeline.plan
            if self.options.run_dir is not None and self.exchange.leads:
                self._plan.save(self.options.run_dir / "plan.json")
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._timeline = self._pipeline.gather_timeline()
        return loss

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = getattr(self.lightning_module, name)
        pipeline = self._pipeline
        if pipeline is None:
            pipeline = self._prepare(capture_from_step(self.lightning_module, step, name, args, kwargs))
        return pipeline.evaluate(step, args, kwargs)

    def _zeroes_next(self, trainer: Any, accumulate: int) -> bool:
        """Whether ``zero_grad`` follows, and no hook looks at the old gradients before it."""
        hooks = ("on_before_zero_grad", "optimizer_zero_grad")
        if trainer.fit_loop.epoch_loop.batch_idx % accumulate:
            return False
        return not (
            any(self._is_overridden(hook, self.lightning_module) for hook in hooks)
            or any("on_before_zero_grad" in vars(type(callback)) for callback in trainer.callbacks)
        )

    def _is_overridden(self, hook: str, module: Any) -> bool:
        helpers = import_module(f"{self.namespace}.utilities.model_helpers")
        return bool(helpers.is_overridden(hook, module))

    def _owners(self) -> OwnerMap:
        return super()._owners() if self._pipeline is None else self._pipeline.owners

    def _runs_user_code_alone(self) -> bool:
        alone = self._exchange is not None and self._exchange.leading
        return alone or (self._pipeline is not None and self._pipeline.leading)
