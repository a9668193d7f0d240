"""Attention for distance methods, registered with transformers when this package is imported.

From then on `from_pretrained` loads what `ropecli patch` wrote with such a method. Code above this package takes
`load_model` from here, so that it can load every checkpoint.
"""

from ropecli.attention.attention_function import register
from ropecli.live.loading import load_model

__all__ = ["load_model"]

register()
