"""The Modelfile for Ollama, which runs llama.cpp without --rope options (test_llama_cpp.py runs llama.cpp itself)."""

import pytest

from ropecli.engines.engine_export import export_checkpoint
from ropecli.errors import PatchError

WINDOW, TARGET = 256, 1024
STORED = {"none", "linear", "ntk", "yarn", "llama3"}


def test_what_a_gguf_does_not_store_is_refused(patch, patched):
    checkpoint = patched(patch).checkpoint
    if patch in STORED:
        export = export_checkpoint(checkpoint, "ollama")
        assert export.file_text == f"FROM ./model.gguf\nPARAMETER num_ctx {TARGET}\n"
        assert export.command == "ollama create my-model -f Modelfile"
        assert "convert_hf_to_gguf.py" in export.notes[0]
    else:
        with pytest.raises(PatchError, match=r"does not store all of this .* Patch with linear, ntk, abf, or yarn"):
            export_checkpoint(checkpoint, "ollama")


def test_it_stops_at_max_position_embeddings(config_only):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": WINDOW}
    with pytest.raises(PatchError, match=f"max_position_embeddings, {WINDOW} tokens; the scaling reaches {TARGET}"):
        export_checkpoint(config_only(rope_scaling=scaling), "ollama")
