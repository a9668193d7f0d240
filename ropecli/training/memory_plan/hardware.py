"""What a plan is told and says in words: GPUs by name, sizes of memory, and engines."""

from contextlib import suppress

from pydantic import ByteSize, TypeAdapter

from ropecli.errors import RecipeError, shown

GPUS = {
    "a100": 312e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
    "l40s": 362e12,
    "a6000": 155e12,
    "rtx4090": 165e12,
}
"""Dense bfloat16 operations per second, from the vendors' data sheets."""


def parse_size(text: str, name: str) -> int:
    """Parse a size in bytes: 80GB is 80 × 10⁹ bytes, 80GiB is 80 × 2³⁰. name: for the message.

    Raises RecipeError.
    """
    if not text.strip().isdecimal():  # without a unit
        with suppress(ValueError):
            return int(TypeAdapter(ByteSize).validate_python(text))
    raise RecipeError(f"{name} is {shown(text)}; expected a number with a unit, such as 80GB (10⁹ bytes) or 80GiB.")


TRAINING_ENGINES = {"one": "one GPU", "ddp": "DDP", "fsdp2": "FSDP2", "fsdp2-cp": "FSDP2 + CP"}
