"""Which model is measured: a digest of its weights, and one of its scaling.

A patched folder and the same method in memory are the same model, under every name.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ropecli.checkpoint.files import is_file
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.state import Positions, read_state
from ropecli.hashing import digest, sha256_of
from ropecli.scaling.spec import varies_with_length

_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")


class Identity(NamedTuple):
    """weights: of the weights, the tokenizer, and config.json before any patch; the commit of a Hub id without weights.

    scaling: of the rotary tables as float32, and of the distance method.
    """

    weights: str
    scaling: str


def identity_of(checkpoint: Checkpoint, patched: Positions | None = None) -> Identity:
    """patched: by a patch in memory; None: the positions in its files. Reads the weights. Raises CheckpointError."""
    state = read_state(checkpoint)
    positions, parts = patched or state.positions, list[Any]()
    for layer_type, rope in positions.ropes.items():
        follows = (rope.spec, positions.context_length) if varies_with_length(rope) else None
        remapping = rope.remapping and (rope.remapping.params, rope.remapping.pretrained, rope.remapping.target)
        tables = rope.inv_freq.astype(np.float32), round(rope.attention_factor, 6)
        parts += [layer_type, *tables, remapping, follows]
    weights = (replace(checkpoint, config=state.note.original) if state.note else checkpoint).digest
    if checkpoint.has_weights:
        files = [path for name in _TOKENIZER if is_file(path := checkpoint.folder / name)]
        template = (checkpoint.tokenizer_config or {}).get("chat_template")
        weights = f"sha256:{digest(weights, sha256_of(files), template)}"
    return Identity(weights, digest(*parts))
