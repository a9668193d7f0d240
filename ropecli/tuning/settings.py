"""The settings of a tuning run, which are options of `ropecli tune`."""

from collections.abc import Sequence
from typing import Annotated, TypedDict

from annotated_doc import Doc

from ropecli.evaluation.request import DATA, IS_METHOD, SCALING, TOKENS, OriginalLength
from ropecli.signature import Default, Interval, MinLen, OneOf, Only


class TuneSettings(TypedDict, total=False):
    level: Annotated[
        str,
        Default("heads"),
        OneOf(("grid", "heads", "search")),
        Doc(
            "grid: search the constants of a method. heads: also train a gain and a phase per query head and rotary "
            "pair, folded into the weights, and the weights of the norms. search: LongRoPE's evolutionary search for a "
            "factor per pair."
        ),
    ]
    methods: Annotated[
        Sequence[str],
        Default(("yarn",)),
        MinLen(1),
        Doc("Methods whose constants to search, separated by commas: yarn,ntk,abf,llama3."),
        IS_METHOD,
        SCALING,
    ]
    points: Annotated[
        int,
        Default(24),
        Interval(ge=1, le=10_000),
        Only("level", ("grid", "heads")),
        Doc("Number of settings to try, over all methods; at least one each."),
    ]
    short_weight: Annotated[
        float,
        Default(0.25),
        Interval(ge=0),
        Doc("Weight of the loss at the pretraining length, relative to that at the target."),
    ]
    steps: Annotated[int, Default(100), Interval(ge=1), Only("level", ("heads",)), Doc("Maximum training steps.")]
    batch_size: Annotated[int, Default(4), Interval(ge=1), Only("level", ("heads",)), Doc("Sequences per step.")]
    population: Annotated[
        int, Default(64), Interval(ge=1, le=10_000), Only("level", ("search",)), Doc("Population size.")
    ]
    iterations: Annotated[
        int, Default(40), Interval(ge=0, le=10_000), Only("level", ("search",)), Doc("Number of generations.")
    ]
    original_length: Annotated[OriginalLength, Default(None)]
    max_documents: Annotated[
        int | None,
        Default(None),
        Interval(ge=1),
        Doc("Maximum number of documents to read. Default: 16, and as many as the steps need."),
        DATA,
    ]
    targets: Annotated[
        int | None,
        Default(None),
        Interval(ge=1),
        TOKENS,
        Doc("Tokens to score per document, the last ones. Default: half the pretraining length."),
    ]
    seed: Annotated[int, Default(0), Interval(ge=0), Doc("Random seed.")]
