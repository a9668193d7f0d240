"""What is said of a source's documents: how many are used, left out and cut, and why none is left."""

import numpy as np

from ropecli.data.selection import Selection
from ropecli.data.sequences import SourceSequences


def none_long_enough(least: int, lengths: np.ndarray) -> str:
    return (
        f"No document is as long as {least} tokens; the longest of {len(lengths)} has {lengths.max()}. "
        "Ask for fewer, or give longer documents."
    )


def none_left(name: str, selection: Selection, length: int, max_tokens: int | None) -> str:
    """Of a source whose documents are long enough, and still fill no sequence of `length` tokens."""
    budget = "" if max_tokens is None else f"; max_tokens: {max_tokens} allows no more"
    tokens, documents = selection.lengths.sum(), len(selection.documents)
    return (
        f"{name}: the {tokens} tokens of {documents} documents fill no sequence of {length}. "
        f"Of {selection.of} documents {selection.too_short} are too short, keep_short left out {selection.not_drawn}"
        f"{budget}. Use more of them, or shorter sequences."
    )


def sentence(name: str, part: SourceSequences, kind: str, share: float | None) -> str:
    """share: of the stream's sequences that this source gives; None where it gives all."""
    selection, layout = part.selection, part.layout
    used, cut, tokens = _use(part)
    documents = f"{used:,} of {selection.of:,} documents, {_share(used, selection.of)}"
    said = [f"{name}: {len(part):,} sequences ({kind}) from {documents}"]
    if share is not None:
        said.append(f"{share:.1%} of the stream")
    reasons = {
        "too short": selection.too_short,
        "not drawn by keep_short": selection.not_drawn,
        "beyond max_tokens": selection.over_budget,
        "at the end with no sequence to fill": len(selection.documents) - used,
    }
    said += [f"{_share(count, selection.of)} of the documents are {why}" for why, count in reasons.items() if count]
    if cut:
        said.append(f"{_share(cut, used)} of those used are cut")
    if left := int(selection.lengths.sum()) - tokens:
        said.append(f"{_share(left, int(selection.lengths.sum()))} of their tokens fill no sequence")
    if padding := len(layout) * part.length - int((layout.stop - layout.start).sum()):
        said.append(f"{_share(padding, len(layout) * part.length)} of the sequences is padding")
    return "; ".join(said) + "."


def _share(part: int, whole: int) -> str:
    """Of what there is, and be it little: never 0.0%."""
    return f"{part / whole:.1%}" if part / whole >= 0.0005 else "under 0.1%"


def _use(part: SourceSequences) -> tuple[int, int, int]:
    """Documents used; of these, those that no sequence holds whole; and tokens used."""
    layout, lengths = part.layout, part.selection.lengths
    tokens = np.minimum(layout.stop, lengths[layout.document]) - layout.start
    pieces = np.bincount(layout.document[tokens > 0], minlength=len(lengths))
    of_document = np.bincount(layout.document, weights=tokens, minlength=len(lengths)).astype(np.int64)
    cut = (pieces > 1) | (of_document < part.whole_lengths)
    return int((pieces > 0).sum()), int((cut & (pieces > 0)).sum()), int(tokens.sum())
