"""What can be wrong with a checkpoint's files or a planned patch: one record per rule."""

from typing import Any, NamedTuple


class Rule(NamedTuple):
    """about: `files` (of the checkpoint), `scaling` (a planned one) or `writing` (it to disk).

    is_fixed: whether a patch fixes it. changes_results: whether a reader computes something else than the files say, or
    positions beyond the scaling; every command about running the checkpoint repeats these.
    """

    about: str = "files"
    is_fixed: bool = True
    changes_results: bool = True


_OF_SCALING, _OF_WRITING = Rule("scaling", changes_results=False), Rule("writing", changes_results=False)
DEFAULT_BASE, MISREAD, NO_LENGTH, TEXT_TRUNCATE = "default-base", "misread", "no-pretraining-length", "text-for-a-bool"
RULES = {
    # fields that transformers ignores or reads otherwise
    **dict.fromkeys(("unread-base", "unread-type", "unread-layer-base", "unread-length", "unread-key"), Rule()),
    **dict.fromkeys(("two-scalings", "one-dialect", "engine-type", TEXT_TRUNCATE), Rule()),
    **dict.fromkeys((MISREAD, "no-text-config", "outside-text-config"), Rule(is_fixed=False)),
    # values that are missing, or that the makers contradict
    DEFAULT_BASE: Rule(is_fixed=False),
    **dict.fromkeys((NO_LENGTH, "wrong-original-length", "makers-length"), Rule()),
    **dict.fromkeys(("foreign-scaling", "foreign-length", "beyond-makers"), Rule()),
    # other files
    "edited": Rule(),
    "adapter-beside-model": Rule(is_fixed=False),
    "mistral-format": Rule("writing"),
    # lengths: some readers stop earlier
    **dict.fromkeys(("context-below-scaling", "tokenizer-caps"), Rule(changes_results=False)),
    "context-beyond-scaling": Rule("scaling"),
    "switches-with-length": Rule("scaling", is_fixed=False),
    # planned patches
    **dict.fromkeys(("kept-scaling", "shorter-context", "not-extended", "no-scaling", "replaces-shipped"), _OF_SCALING),
    **dict.fromkeys(("replaces-attention-factor", "lost-attention-factor", "near-layers", "layers"), _OF_SCALING),
    **dict.fromkeys(("own-attention", "custom-code", "dynamic-length", "base-in-record"), _OF_WRITING),
}


class Finding(NamedTuple):
    """A warning about a checkpoint's files or a planned patch. fix: a command that fixes it, if there is one."""

    rule: str
    message: str
    fix: str | None = None

    @property
    def record(self) -> Rule:
        return RULES[self.rule]

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "changes_results": self.record.changes_results}
