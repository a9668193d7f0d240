"""Sentences that are the same for several engines."""

from ropecli.export.positions import Positions

ANOTHER_BASE = "Patch with ntk or abf, which are nothing but another base"
BY_VLLM = "Serve the folder with vLLM."
KEEPS_SECTIONS = "Patch with yarn, ntk or abf."


def one_table(positions: Positions, engine: str) -> str:
    """What becomes of dynamic NTK where the engine has one table of frequencies. engine: its part of the sentence."""
    return (
        f"{engine}: every request gets the frequencies that it has at {positions.window} tokens, where transformers "
        f"leaves requests up to {positions.original_window} as they were pretrained."
    )


def drops_sections(rope_type: str) -> str:
    return f"with rope_type {rope_type!r} it drops the sections of multimodal positions without a word."


def counted_twice(positions: Positions) -> str:
    """The window that is taken for linear, where config.json has it raised already."""
    return f"{round(positions.window * positions.factor)} for the window, the factor counted twice."
