"""Attention for distance methods.

Importing this package registers it with transformers, so that `from_pretrained` loads checkpoints patched with such a
method. Import `load_model` from here to load every checkpoint.
"""

from ropecli.attention.attention_function import register
from ropecli.live.loading import load_model

__all__ = ["load_model"]

register()
