"""One block of attention: the scores of all branches side by side, one softmax over them, their values."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Hidden(NamedTuple):
    """Of a part's keys, those from first to stop that not all its queries see.

    mask: shape (rows, stop - first), true where one is not seen.
    """

    first: int
    stop: int
    mask: Tensor


class Part(NamedTuple):
    """What a block sees by one branch: a unit is a head of keys, and the group of query heads that share it.

    query: shape (units, group, rows, head_dim); key: (units, keys, head_dim); value: (units, keys, width).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Sequence[Hidden]


class Softmax(NamedTuple):
    """How scores become probabilities, as BlockAttention is told. sinks: shape (units, group)."""

    softcap: float | None
    sinks: Tensor | None
    dropout: float


def attend_block(parts: Sequence[Part], softmax: Softmax, workspace: Tensor | None) -> Tensor:
    """Shape (units, group, rows, width).

    workspace: shape (2, numbers), where scores and probabilities are put, which spares fresh memory for each block.
    None where gradients are wanted: those need everything to stay as it was.
    """
    units, group, rows, _ = parts[0].query.shape
    stops = list(accumulate(part.key.shape[1] for part in parts))
    scores = _join(parts, softmax) if workspace is None else _write(parts, stops, softmax, workspace[0])
    _mask(scores.view(units, group, rows, -1), parts, stops)
    if workspace is None:
        probabilities = torch.softmax(scores, -1)
    else:
        probabilities = torch.softmax(scores, -1, out=workspace[1, : scores.numel()].view_as(scores))
    if softmax.dropout:
        probabilities = torch.nn.functional.dropout(probabilities, softmax.dropout)
    shares = [probabilities[..., stop - part.key.shape[1] : stop] for part, stop in zip(parts, stops, strict=True)]
    result = torch.bmm(shares[0], parts[0].value)
    for share, part in zip(shares[1:], parts[1:], strict=True):
        result = torch.baddbmm(result, share, part.value)
    return result.unflatten(1, (group, rows))


def _join(parts: Sequence[Part], softmax: Softmax) -> Tensor:
    """Scores, shape (units, group·rows, keys of all parts, and one more where there are sinks)."""
    scores = [torch.bmm(part.query.flatten(1, 2), part.key.mT) for part in parts]
    if softmax.softcap:
        scores = [torch.tanh(one / softmax.softcap) * softmax.softcap for one in scores]
    if softmax.sinks is not None:
        scores.append(_column(softmax.sinks, parts[0].query.shape[2]))
    return torch.cat(scores, -1)


def _write(parts: Sequence[Part], stops: Sequence[int], softmax: Softmax, space: Tensor) -> Tensor:
    """The same as _join, in `space`."""
    units, group, rows, _ = parts[0].query.shape
    width = stops[-1] + (softmax.sinks is not None)
    scores = space[: units * group * rows * width].view(units, group * rows, width)
    for part, stop in zip(parts, stops, strict=True):
        torch.bmm(part.query.flatten(1, 2), part.key.mT, out=scores[..., stop - part.key.shape[1] : stop])
    if softmax.softcap:
        scores[..., : stops[-1]].div_(softmax.softcap).tanh_().mul_(softmax.softcap)
    if softmax.sinks is not None:
        scores[..., stops[-1] :] = _column(softmax.sinks, rows)
    return scores


def _column(sinks: Tensor, rows: int) -> Tensor:
    return sinks[..., None].expand(-1, -1, rows).flatten(1)[..., None]


def _mask(scores: Tensor, parts: Sequence[Part], stops: Sequence[int]) -> None:
    """scores: shape (units, group, rows, keys)."""
    lowest = torch.finfo(scores.dtype).min  # not -inf: a row of nothing else would become NaN, and so its gradients
    for part, stop in zip(parts, stops, strict=True):
        before = stop - part.key.shape[1]
        for first, last, mask in part.hidden:
            scores[..., before + first : before + last].masked_fill_(mask, lowest)
