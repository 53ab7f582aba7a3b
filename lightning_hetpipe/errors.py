"""What can go wrong: one base class, and one kind for each place a reader would look."""


class HetPipeError(Exception):
    """Base of every error this package raises on purpose.

    A message says what was asked (with the values), why it cannot be, and what to do.
    """


class ClusterError(HetPipeError, ValueError):
    """A cluster description is malformed or contradicts itself."""


class GraphError(HetPipeError, ValueError):
    """A module cannot be turned into a chain of layers."""


class ScheduleError(HetPipeError, ValueError):
    """An action list is malformed, incomplete, or would deadlock."""


class ProfileError(HetPipeError, ValueError):
    """A profile is malformed, stale, or belongs to another model or machine."""


class NormError(HetPipeError, ValueError):
    """A normalisation policy that does not exist, or that does not fit a layer."""


class PlanError(HetPipeError, ValueError):
    """A plan is malformed, or belongs to another model, cluster or batch."""


class InfeasibleError(PlanError):
    """No plan satisfies the limits; the message lists numbered remedies."""


class CheckpointError(HetPipeError, RuntimeError, ValueError):
    """A checkpoint belongs to another model or optimizer. Of the kinds that torch raises for the same."""


class UnsupportedError(HetPipeError, NotImplementedError):
    """A feature of PyTorch or Lightning that a pipeline cannot honour."""


class StepError(HetPipeError, RuntimeError):
    """A user's step does something that the pipeline cannot run."""


class RankFailedError(HetPipeError, RuntimeError):
    """Another rank failed or died; names the rank, its action and its micro-batch."""


class MemoryLimitError(HetPipeError, MemoryError):
    """A rank needs more memory than its device's emulated limit; names the rank, its action and the limit."""
