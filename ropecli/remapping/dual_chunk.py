"""Dual Chunk Attention: positions start again in every block, and queries look at those before from behind their ends.

Source: An et al. 2024 (arXiv:2402.17463), section 3. The paper's chunk size s is the stride here, and its c, the length
that distances stay in, is `chunk`, as in the authors' code, which leaves a quarter of the pretraining length unused.
"""

import numpy as np

from ropecli.errors import MethodError
from ropecli.remapping.branches import check_window
from ropecli.rope import Branch, Remapping
from ropecli.scaling.registry import remapping_method


@remapping_method("dual-chunk", source="An et al. 2024, arXiv:2402.17463, section 3", training="no",
                  other_names=("dual_chunk", "dca", "chunkllama"))  # fmt: skip
def dual_chunk(pretrained: int, target: int, *, chunk: int | None = None, local_window: int | None = None) -> Remapping:
    """Dual Chunk Attention: positions start again in every block of chunk - local_window tokens; ρ stays within chunk.

    With c for the length of a block, keys are at m mod c. Queries are at n mod c for the keys of their own block, at
    min(n mod c + c, chunk) for those of the block before, and at chunk for all others: distances up to local_window
    stay as they are. chunk: tokens; three quarters of the pretraining length unless given. local_window: tokens; an
    eighth of the pretraining length unless given. The factor sets the context length alone. Raises MethodError
    for a chunk above the pretraining length, not above local_window, or below two of them.
    """
    local_window = local_window or max(1, pretrained // 8)
    chunk = check_window("dual-chunk", "chunk", chunk or max(2, 3 * pretrained // 4), pretrained)
    stride = chunk - local_window
    if stride <= 0:
        raise MethodError(f"dual-chunk: chunk is {chunk}; it must be above local_window, which is {local_window}.")
    if stride < local_window:
        raise MethodError(
            f"dual-chunk: local_window is {local_window}; it must be at most {chunk // 2}, half of chunk, which is "
            f"{chunk}: keys {stride + 1} tokens back can be two blocks of {stride} away, where distances are not kept."
        )
    return Remapping(_branches(chunk, stride), {"chunk": chunk, "local_window": local_window})


def _branches(chunk: int, stride: int) -> tuple[Branch, Branch, Branch]:
    """The query's own block, the one before, and all before that."""

    def own(n: np.ndarray) -> np.ndarray:
        return n // stride * stride

    def before(n: np.ndarray) -> np.ndarray:
        return np.maximum(own(n) - stride, 0)

    def key(m: np.ndarray) -> np.ndarray:
        return m % stride

    return (
        Branch(own, lambda n: n + 1),
        Branch(before, own, lambda n: np.minimum(n % stride + stride, chunk), key),
        Branch(np.zeros_like, before, lambda n: np.full_like(n, chunk), key),
    )
