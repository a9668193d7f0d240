"""ropecli: extends the context window of Hugging Face checkpoints with rotary position embeddings.

The Python API; each name is imported when it is first used, so that `import ropecli` costs nothing.
"""

import importlib
from typing import Any

_API = {
    "RopeGeometry": "ropecli.rope",
    "ScaledRope": "ropecli.rope",
    "ScalingSpec": "ropecli.rope",
    "RopecliError": "ropecli.errors",
    "scale": "ropecli.scaling.registry",
    "scaling_methods": "ropecli.scaling.registry",
    "open_checkpoint": "ropecli.checkpoint.reading",
    "inspect_checkpoint": "ropecli.checkpoint.inspection",
    "make_plan": "ropecli.checkpoint.plan",
    "patch_to": "ropecli.checkpoint.writing",
    "rotary_tables": "ropecli.checkpoint.live",
    "live_patch": "ropecli.checkpoint.live",
    "restored": "ropecli.checkpoint.live",
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
}
__all__ = list(_API)


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(importlib.import_module(_API[name]), name)
    raise AttributeError(f"module 'ropecli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
