"""Dual Chunk Attention: positions restart in every block, and queries see earlier blocks from a larger position.

Source: An et al. 2024 (arXiv:2402.17463), section 3. The paper's chunk size s is `stride` here. Its c, the bound of the
distances, is `chunk`, as in the authors' code, which uses three quarters of the pretraining length. Qwen2.5-1M
(arXiv:2501.15383) runs it with yarn_temperature.
"""

import numpy as np

from ropecli.errors import MethodError
from ropecli.remapping.near_and_far import check_window
from ropecli.rope import Branch, Remapping
from ropecli.scaling.registry import remapping_method


@remapping_method("dual-chunk", source="An et al. 2024, arXiv:2402.17463, section 3", training="no")  # fmt: skip
def dual_chunk(pretrained: int, target: int, *, chunk: int | None = None, local_window: int | None = None) -> Remapping:
    """Dual Chunk Attention: restart positions in every block of chunk - local_window tokens, so that ρ <= chunk.

    With block length c, a key has position m mod c. A query has position n mod c for keys of its own block,
    min(n mod c + c, chunk) for keys of the previous block, and chunk for all earlier keys. Distances up to local_window
    are unchanged. chunk: tokens. Default: three quarters of the pretraining length. local_window: tokens. Default: an
    eighth of the pretraining length. The factor only sets the context length. Raises MethodError unless
    local_window <= chunk / 2 and chunk <= pretraining length.
    """
    local_window = local_window or max(1, pretrained // 8)
    chunk = check_window("dual-chunk", "chunk", chunk or max(2, 3 * pretrained // 4), pretrained)
    stride = chunk - local_window
    if stride < local_window:
        raise MethodError(
            f"dual-chunk: local_window is {local_window}; expected at most {chunk // 2}, half of chunk ({chunk}). "
            "Otherwise keys two blocks away would get a wrong distance."
        )
    return Remapping(_branches(chunk, stride), {"chunk": chunk, "local_window": local_window})


def _branches(chunk: int, stride: int) -> tuple[Branch, Branch, Branch]:
    """The query's own block, the previous block, and all earlier blocks."""

    def block(n: np.ndarray) -> np.ndarray:
        return n // stride * stride

    def before(n: np.ndarray) -> np.ndarray:
        return np.maximum(block(n) - stride, 0)

    def key(m: np.ndarray) -> np.ndarray:
        return m % stride

    return (
        Branch(block, lambda n: n + 1),
        Branch(before, block, lambda n: np.minimum(n % stride + stride, chunk), key),
        Branch(np.zeros_like, before, lambda n: np.full_like(n, chunk), key),
    )
