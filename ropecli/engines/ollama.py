"""A Modelfile for Ollama, checked in the source of release 0.33.0-rc2 (llm/{server,llama_server}.go, convert/*.go).

- Ollama runs the llama-server of llama.cpp b10488 with `-c num_ctx` and without --rope options: the scaling is what the
  GGUF stores (see llama_cpp.py). `num_ctx` defaults to 4k, 32k or 256k, by the GPU's memory; it is cut to the file's
  context_length with only a line in the server's log.
- `FROM` a folder of safetensors uses Ollama's own converter. For Llama it stores linear and llama3 and silently drops
  yarn, longrope and dynamic.
"""

from ropecli.engines.engine_table import LATENT, PROPORTIONAL_FACTOR, ROUNDS_GPT_OSS, Case, EngineTable
from ropecli.engines.llama_cpp import CONVERSION_NOTES, CONVERTER, MODEL, differs_by_layer, stored_in_file

_NAME = "my-model"


ENGINE = EngineTable(
    title="Ollama",
    command=lambda p: ("ollama", "create", _NAME, "-f"),
    overrides=lambda p: {"FROM": f"./{MODEL}", "PARAMETER num_ctx": p.length},
    file_name="Modelfile",
    file_text=lambda overrides: "".join(f"{instruction} {value}\n" for instruction, value in overrides.items()),
    refused=(
        LATENT,
        PROPORTIONAL_FACTOR,
        Case(
            lambda p: differs_by_layer(p) and not stored_in_file(p),
            "it has no RoPE options, and the layers of {p.model_type} differ. Serve the folder with vLLM.",
        ),
        Case(
            lambda p: not stored_in_file(p),
            f"it has no RoPE options, and {CONVERTER} does not store all of this {{p.rope_type}} scaling for "
            "{p.model_type}. Patch with linear, ntk, abf, or yarn with its default betas and attention factor; or "
            "serve it with another engine.",
        ),
        Case(
            lambda p: not p.raised,
            "it reads no more than max_position_embeddings, {p.written_length} tokens; the scaling reaches {p.length}. "
            "Raise max_position_embeddings.",
        ),
    ),
    cannot=(ROUNDS_GPT_OSS,),
    notes=(
        *CONVERSION_NOTES,
        Case(
            lambda p: p.rope_type in ("yarn", "longrope"),
            f"Keep FROM ./{MODEL}: Ollama's own converter of safetensors folders silently drops {{p.rope_type}}.",
        ),
        Case(
            lambda p: p.has_two_factor_lists,
            "Once num_ctx is above {p.original_length}, every request uses long_factor.",
        ),
        f"Then: ollama run {_NAME}.",
    ),
)
