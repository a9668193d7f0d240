"""A plan's patch on a live model: on its rotary tables and, by relative-position methods, on its attention."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ropecli.config.saved_remapping import Carrier
from ropecli.rope import ScaledRope

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def live_patch(model: "PreTrainedModel", ropes: Mapping[str | None, ScaledRope]) -> None:
    """Patches a model in memory, by the ropes of a plan (plan.ropes), in place of any patch that it has.

    Methods that depend on the length follow it: every forward pass turns by its own largest position, whatever
    passes came before. Keys that lie in a KV cache keep the rotation they got. Relative-position methods are proved on
    the spot. `unpatched_after` takes it back. Raises PatchError for layer types without a rope, for a model that does
    not turn by its tables, for DeepSeek's mscale_all_dim, which is not in the tables, and for an attention that a
    relative-position method would not do right; the model is then as it was.
    """
    from ropecli.attention.in_memory import plain_live, remap_live
    from ropecli.live.rotary import turn_by

    put_back, carrier = _remember(model), Carrier.of(ropes.values())
    try:
        plain_live(model)
        turn_by(model, ropes)
        if carrier is not None:
            remap_live(model, carrier, ropes)
    except BaseException:  # all of it or nothing
        put_back()
        raise


@contextlib.contextmanager
def unpatched_after(model: "PreTrainedModel") -> Iterator[None]:
    """At the end, the model's rotary tables and its attention are again as they were at the beginning."""
    put_back = _remember(model)
    try:
        yield
    finally:
        put_back()


def _remember(model: "PreTrainedModel") -> Callable[[], None]:
    from ropecli.attention.in_memory import remember_attention
    from ropecli.live.rotary import remember, rotary_tables

    tables, attention = remember(rotary_tables(model)), remember_attention(model)

    def put_back() -> None:
        tables()
        attention()

    return put_back
