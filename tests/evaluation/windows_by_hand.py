"""What each protocol reads and scores, written a second time: from the sources that ropecli names, not its code.

Every function gives (ids that the model reads, ids that it is scored on) per window: the last of what it reads predicts
the last of what it is scored on.
"""

from collections.abc import Iterator, Sequence

Windows = Iterator[tuple[list[int], list[int]]]


def sliding(ids: Sequence[int], prefix: Sequence[int], length: int, stride: int) -> Windows:
    """Token by token: each is scored in the first window that holds it, windows beginning at 0, stride, 2 stride, …

    Of the first window not what begins every text, nor a token that has nothing before it.
    """
    by_start: dict[int, list[int]] = {}
    for index in range(max(1, len(prefix)), len(ids)):
        start = 0
        while start + length <= index:
            start += stride
        by_start.setdefault(start, []).append(index)
    for start, scored in by_start.items():
        begun = list(prefix) if start else list(ids[: len(prefix)])
        yield [*begun, *ids[start + len(prefix) : scored[-1]]], [ids[index] for index in scored]


def rolling(text: Sequence[int], prefix_token: int, length: int) -> Windows:
    """lm-eval's rolling windows. The first: the prefix token and length - 1 tokens, which predict length tokens. Then
    length tokens that predict the next length, and the last window reaches back so that it too reads length tokens."""
    text = list(text)
    if not text:
        return
    yield [prefix_token, *text[: min(length, len(text)) - 1]], text[:length]
    done = min(length, len(text))
    while done < len(text):
        end = min(done + length, len(text))
        yield text[end - length - 1 : end - 1], text[done:end]
        done = end


def yarn_script(text: Sequence[int], bos: int | None, length: int) -> Windows:
    """eval/perplexity.py: labels masked by `[:, :-trg_len]`, and Hugging Face's own shift of labels."""
    text = list(text)
    most = length - 1 if bos is not None else length
    previous_end = 0
    for begin in range(0, len(text), 256):
        end = min(begin + most, len(text))
        trg_len = end - previous_end
        input_ids = ([bos] if bos is not None else []) + text[begin:end]
        labels = list(input_ids)
        labels[:-trg_len] = [-100] * len(labels[:-trg_len])
        targets = [label for label in labels[1:] if label != -100]
        yield input_ids[:-1], targets
        previous_end = end
        if end == len(text):
            return
