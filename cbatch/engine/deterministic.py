"""Steps in which a token has the same bits whatever else is in them (`--deterministic`)."""

from __future__ import annotations

from cbatch.attention.base import AttentionBackend
from cbatch.base.errors import ConfigError
from cbatch.model.base import Model
from cbatch.model.cuda import CudaModel


def as_batch_invariant(model: Model) -> Model:
    """The same model with operations that are batch-invariant, if it has such."""
    return model.as_batch_invariant() if isinstance(model, CudaModel) else model


def check_batch_invariant(model: Model, attention: AttentionBackend) -> None:
    """Raises ConfigError, with the reason, if a token's bits depend on what else is in its step."""
    if model.batch_invariant and (attention.batch_invariant or not model.layers):
        return
    reason = "operations of torch compute the layers of this model"
    if isinstance(model, CudaModel) and model.ops.batch_invariant:
        reason = "operations of torch compute attention"
        if model.has_adapters:
            reason = "operations of torch compute the LoRA adapters"
        elif model.states:
            reason = "the kernels for the recurrent layers of this model round a prompt as it is cut"
    raise ConfigError(
        f"--deterministic cannot be promised: {reason} on {model.device}. Leave it out, or choose a model with a fast "
        "path; cbatch info shows the path of a model."
    )
