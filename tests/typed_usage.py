"""What a type checker sees of `import ropecli`; `scripts/check` runs mypy on this file.

A comment `type: ignore` that nothing needs is an error here, so each one proves that mypy refuses the call.
"""

# mypy: warn-unused-ignores

from typing import assert_type

import ropecli
from ropecli.commands.finetune import FinetuneResult
from ropecli.commands.measure import Reports
from ropecli.commands.recipe import RecipeList
from ropecli.engines.engine_export import Export


def use() -> None:
    assert_type(ropecli.eval_ppl("demo", data="demo"), Reports)
    assert_type(ropecli.eval_ppl("demo", data="demo", device_map="auto", max_memory="cpu=1GB"), Reports)
    assert_type(ropecli.needle("demo"), Reports)
    assert_type(ropecli.compare(["demo"], data="demo"), Reports)
    assert_type(ropecli.finetune("demo", output="out"), FinetuneResult)
    assert_type(ropecli.recipe("yarn-128k"), RecipeList)
    assert_type(ropecli.export("demo", engine="vllm"), Export)


def misuse() -> None:
    ropecli.eval_ppl("demo", data="demo", dtyp="float32")  # type: ignore[call-arg]
    ropecli.eval_ppl("demo")  # type: ignore[call-arg]
    ropecli.eval_ppl("demo", data="demo", dtype=32)  # type: ignore[arg-type]
    ropecli.compare(["demo"], data="demo", lengths="256")  # type: ignore[arg-type]
    ropecli.needle("demo", samples=None)  # type: ignore[arg-type]
    ropecli.needle("demo", max_documents=3)  # type: ignore[call-arg]
    ropecli.ruler(["demo"], threshold="0.5")  # type: ignore[arg-type]
    ropecli.extend("demo", length=1024, attn=1)  # type: ignore[arg-type]
    ropecli.theory("demo", factor="4")  # type: ignore[arg-type]
