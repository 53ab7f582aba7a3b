"""Turns a module into layers with torch.fx, and runs of layers back into modules."""

from lightning_hetpipe.tracing.spec import Signature, TensorSpec, signature_of
from lightning_hetpipe.tracing.stage import StageModule
from lightning_hetpipe.tracing.traced import Traced, trace

__all__ = ["Signature", "StageModule", "TensorSpec", "Traced", "signature_of", "trace"]
