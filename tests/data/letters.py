"""A tokenizer with one token per character, and texts for it; used by test modules and their subprocesses."""

import time
from collections.abc import Iterator


class Letters:
    is_fast = False
    bos_token_id = None
    eos_token_id = None

    def __call__(self, texts, **options):
        rows = [[ord(letter) for letter in text] for text in ([texts] if isinstance(texts, str) else texts)]
        return {"input_ids": rows[0] if isinstance(texts, str) else rows}


def texts(documents: int = 100, wait: float = 0.0) -> Iterator[tuple[str, str]]:
    """wait: seconds before each document."""
    for at in range(documents):
        time.sleep(wait)
        yield str(at), f"{at:03} " * 3_000
