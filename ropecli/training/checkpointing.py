"""The switch of gradient checkpointing: layers are computed again in the backward pass, in place of kept.

transformers is renaming it; the older names warn that they are on their way out. Non-reentrant is its default.
"""

from typing import Any


def enable_checkpointing(model: Any) -> None:
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def disable_checkpointing(model: Any) -> None:
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()


def is_checkpointing(model: Any) -> bool:
    newer = getattr(model, "is_activation_checkpointing", None)
    return bool(model.is_gradient_checkpointing if newer is None else newer)
