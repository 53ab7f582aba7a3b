"""The user's step, suspended where it calls the pipelined module.

    start(m):   training_step(slice m) ──► self.net(x) ─┐        x goes to the first stage
                                           suspended ◄──┘
    finish(m):                 output ──► resumes ──► returns the loss

The step runs in a greenlet: another stack of the same OS thread, so autocast, grad mode and everything
else that is thread-local is the same inside and outside.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from lightning_hetpipe.errors import StepError


@dataclass(frozen=True)
class ModuleCall:
    """A call of the pipelined module by user code.

    Attributes:
        args, kwargs: What it was called with.
        site: ``file:line`` of the call.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    site: str = ""


Answer = Callable[[ModuleCall], Any]


class StandIn:
    """Takes the place of a module's ``forward``: whoever listens answers its calls.

    It is an instance attribute, so module tree, parameter names and hooks stay as they are.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self._module = module
        self._listeners: list[Answer] = []

    def install(self) -> None:
        self._module.forward = self._forward

    def remove(self) -> None:
        self._module.__dict__.pop("forward", None)

    @property
    def installed(self) -> bool:
        return "forward" in self._module.__dict__

    def answered_by(self, answer: Answer) -> "_Listening":
        """A context in which ``answer`` gets the calls and gives the module's outputs."""
        return _Listening(self._listeners, answer)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._listeners:
            raise StepError(
                f"{self.name} was called at {_call_site()}, outside of a *_step or an epoch-end hook of the "
                "LightningModule. Its layers are spread over several ranks, which take part in those only: "
                "move the call there, or call the module after the run has ended."
            )
        return self._listeners[-1](ModuleCall(args, kwargs, _call_site()))


class _Listening:
    def __init__(self, listeners: list[Answer], answer: Answer) -> None:
        self._listeners, self._answer = listeners, answer

    def __enter__(self) -> None:
        self._listeners.append(self._answer)

    def __exit__(self, *_: object) -> None:
        self._listeners.remove(self._answer)


class SuspendedStep:
    """One run of the user's step that stops at the module call and goes on with its output."""

    def __init__(self, stand_in: StandIn, step: Callable[[], Any], name: str) -> None:
        self._stand_in = stand_in
        self._step = step
        self._name = name
        self._greenlet = greenlet(self._run)
        self._call: ModuleCall | None = None

    def start(self) -> ModuleCall:
        """Runs up to the module call.

        Raises:
            StepError: The step ended without the call.
        """
        state = _thread_state()
        call = self._greenlet.switch()
        if not isinstance(call, ModuleCall):
            raise StepError(
                f"{self._name} returned without calling {self._stand_in.name}, which is the pipelined "
                "module. In training it must be called exactly once per step: call it, or name the "
                "module that is called with HetPipeStrategy(module=...)."
            )
        if _thread_state() != state:
            raise StepError(
                f"{self._name} calls {self._stand_in.name} at {call.site} with another grad mode or autocast "
                "than the step began with. Other ranks cannot follow that: use Trainer(precision=...) for "
                "autocast, and call the module with gradients on."
            )
        self._call = call
        return call

    def finish(self, output: Any) -> Any:
        """Goes on with the module's output and gives what the step returns.

        Raises:
            StepError: The step calls the module again.
        """
        assert self._call is not None
        result = self._greenlet.switch(output)
        if not self._greenlet.dead:
            self.abandon()
            raise StepError(
                f"{self._name} calls {self._stand_in.name} twice, at {self._call.site} and at {result.site}. "
                "In training the pipeline can run it once per step: call it once on the joined input, "
                "or train this model without a pipeline."
            )
        return result

    def abandon(self) -> None:
        """Ends a suspended step; its ``finally`` blocks run."""
        if self._greenlet and not self._greenlet.dead:
            self._greenlet.throw()

    def _run(self) -> Any:
        with self._stand_in.answered_by(self._suspend):
            return self._step()

    def _suspend(self, call: ModuleCall) -> Any:
        parent = getcurrent().parent
        assert parent is not None
        return parent.switch(call)


@dataclass
class StepResult:
    """What a training step returned, apart into the loss and the rest."""

    loss: Tensor
    extra: dict[str, Any] | None = field(default=None)


def read_result(result: Any, name: str) -> StepResult:
    """Takes a step's return value apart.

    Raises:
        StepError: It holds no loss with one element.
    """
    if result is None:
        raise StepError(
            f"{name} returned None for one micro-batch. Skipping a batch is not possible when other ranks "
            "have already computed on it: return a loss (0 * loss skips its effect)."
        )
    loss = result.get("loss") if hasattr(result, "get") else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise StepError(
            f"{name} returned {_describe(result)}: return the loss, a tensor with one element, or a dict "
            "with the key 'loss'"
        )
    extra = None if loss is result else {key: value for key, value in result.items() if key != "loss"}
    return StepResult(loss.reshape(()), extra)


def _describe(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    if hasattr(result, "keys"):
        return f"a {type(result).__name__} with the keys {', '.join(map(str, result))}"
    return f"a {type(result).__name__}"


def _thread_state() -> tuple[object, ...]:
    """What one thread shares between the step and the stages, and other ranks do not see."""
    return (
        torch.is_grad_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
    )


def _call_site() -> str:
    """``file:line`` of the nearest caller outside torch and this package."""
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(("torch.", "lightning_hetpipe.strategy", "greenlet")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"
