"""ropecli: extends the context window of Hugging Face checkpoints with rotary position embeddings.

The Python API; each name is imported when it is first used, so that `import ropecli` costs nothing. For transformers'
own `from_pretrained`, `import ropecli.attention` registers the attention that distance methods need.
"""

import importlib
from typing import Any

_API = {
    "RopeGeometry": "ropecli.rope",
    "ScaledRope": "ropecli.scaling.spec",
    "ScalingSpec": "ropecli.scaling.spec",
    "make_spec": "ropecli.scaling.spec",
    "RopecliError": "ropecli.errors",
    "scale": "ropecli.scaling.scale",
    "scaling_methods": "ropecli.scaling.registry",
    "summarize": "ropecli.analysis.summary",
    "smallest_base": "ropecli.analysis.base_bound",
    "open_checkpoint": "ropecli.checkpoint.opening",
    "inspect_checkpoint": "ropecli.checkpoint.inspection",
    "make_plan": "ropecli.checkpoint.patch_plan",
    "make_study": "ropecli.checkpoint.inspection",
    "patch_to": "ropecli.attention.patching",
    "rotary_tables": "ropecli.live.rotary",
    "live_patch": "ropecli.attention.patching",
    "unpatched_after": "ropecli.attention.patching",
    "export_checkpoint": "ropecli.engines.engine_export",
    "read_texts": "ropecli.data.sources",
    "read_documents": "ropecli.data.documents",
    "load_model": "ropecli.attention",
    "load_tokenizer": "ropecli.live.loading",
    "evaluate_perplexity": "ropecli.evaluation.perplexity",
    "Protocol": "ropecli.evaluation.protocols",
    "compare_methods": "ropecli.evaluation.comparison",
    "evaluate_retrieval": "ropecli.evaluation.retrieval.accuracy",
    "read_reports": "ropecli.reporting.report_files",
    "make_recipe": "ropecli.training.recipe",
    "finetune_checkpoint": "ropecli.training.finetuning",
    "plan_stages": "ropecli.training.stages",
    "run_stages": "ropecli.training.stages",
    "merge_to": "ropecli.training.finished_weights",
    "tune_settings": "ropecli.tuning.tuning_settings",
    "tune_checkpoint": "ropecli.tuning.procedure",
    "write_tuned": "ropecli.tuning.procedure",
    "TuneReport": "ropecli.tuning.tune_report",
}
__all__ = list(_API)


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(importlib.import_module(_API[name]), name)
    raise AttributeError(f"module 'ropecli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
