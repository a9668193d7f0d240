"""ropecli: extends the context window of Hugging Face checkpoints with rotary position embeddings.

The Python API; each name is imported when it is first used, so that `import ropecli` costs nothing. It also makes the
relative-position methods known to transformers, so that `from_pretrained` loads what `ropecli patch` wrote with them.
"""

import importlib
from typing import Any

from ropecli.on_import import after_import

_API = {
    "RopeGeometry": "ropecli.rope",
    "ScaledRope": "ropecli.rope",
    "ScalingSpec": "ropecli.rope",
    "RopecliError": "ropecli.errors",
    "scale": "ropecli.scaling.registry",
    "scaling_methods": "ropecli.scaling.registry",
    "summarize": "ropecli.theory.summary",
    "smallest_base": "ropecli.theory.base_bound",
    "open_checkpoint": "ropecli.checkpoint.reading",
    "inspect_checkpoint": "ropecli.checkpoint.inspection",
    "make_plan": "ropecli.checkpoint.plan",
    "make_study": "ropecli.checkpoint.study",
    "patch_to": "ropecli.checkpoint.writing",
    "rotary_tables": "ropecli.checkpoint.live",
    "live_patch": "ropecli.checkpoint.in_memory",
    "unpatched_after": "ropecli.checkpoint.in_memory",
    "export_checkpoint": "ropecli.export.engine",
    "read_texts": "ropecli.data.sources",
    "read_documents": "ropecli.data.documents",
    "load_model": "ropecli.evaluate.loading",
    "load_tokenizer": "ropecli.evaluate.loading",
    "evaluate_perplexity": "ropecli.evaluate.perplexity",
    "Protocol": "ropecli.evaluate.protocols",
    "compare_methods": "ropecli.evaluate.comparison",
    "evaluate_retrieval": "ropecli.evaluate.retrieval.grid",
    "read_reports": "ropecli.report.reading",
    "make_recipe": "ropecli.finetune.recipe",
    "finetune_checkpoint": "ropecli.finetune.training",
    "plan_stages": "ropecli.finetune.stages",
    "run_stages": "ropecli.finetune.stages",
    "merge_to": "ropecli.finetune.merging",
    "tune_settings": "ropecli.tune.procedure",
    "tune_checkpoint": "ropecli.tune.procedure",
    "write_tuned": "ropecli.tune.procedure",
    "TuneReport": "ropecli.tune.record",
}
__all__ = list(_API)


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(importlib.import_module(_API[name]), name)
    raise AttributeError(f"module 'ropecli' has no attribute {name!r}")


def _register_attention() -> None:
    from ropecli.checkpoint.attention import register

    register()


after_import("transformers.modeling_utils", _register_attention)


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
