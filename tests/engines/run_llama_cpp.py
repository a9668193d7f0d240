"""Runs where llama-cpp-python is: writes GGUF files with the `gguf` package, and reads them with llama.cpp.

    python run_llama_cpp.py convert JOB.json      weights.npz and config.json of a Llama -> a GGUF in float32
    python run_llama_cpp.py logits JOB.json       tokens -> next-token logits at the positions asked for

A job is a JSON object; what it must hold stands at the top of each function.
"""

import json
import sys

import numpy as np

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def convert(job: dict) -> None:
    """job: config (of the Llama), weights (npz), model (GGUF to write), metadata (key -> string, int or float), tensors
    (name -> list of float). Metadata and tensors are what a converter would store of the scaling."""
    import gguf

    config = job["config"]
    writer = gguf.GGUFWriter(job["model"], "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for key, value in job["metadata"].items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    for name, tensor in np.load(job["weights"]).items():
        writer.add_tensor(*named(name, tensor, config))
    for name, values in job["tensors"].items():
        writer.add_tensor(name, np.array(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def named(name: str, tensor: np.ndarray, config: dict) -> tuple[str, np.ndarray]:
    outside = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outside:
        return outside[name], tensor
    layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(part)
    if heads:
        tensor = neighbours(tensor, config[heads])
    return f"blk.{layer}.{NAMES[part]}.weight", tensor


def neighbours(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows so that the two dimensions of a rotary pair are neighbours, as llama.cpp rotates them for Llama."""
    width = tensor.shape[1]
    return np.ascontiguousarray(tensor.reshape(heads, 2, -1, width).swapaxes(1, 2).reshape(-1, width))


def logits(job: dict) -> None:
    """job: model, arguments (of llama_cpp.Llama), tokens, positions, output (npy: positions × vocabulary)."""
    import llama_cpp

    exact = {"type_k": 0, "type_v": 0, "flash_attn": False}  # 0: float32, where the cache would be float16
    whole = {"logits_all": True, "n_batch": len(job["tokens"]), "n_ubatch": len(job["tokens"]), "n_threads": 2}
    model = llama_cpp.Llama(job["model"], verbose=False, **exact, **whole, **job["arguments"])
    model.eval(job["tokens"])
    np.save(job["output"], np.asarray(model.scores)[job["positions"]])


if __name__ == "__main__":
    with open(sys.argv[2], encoding="utf-8") as file:  # noqa: PTH123
        {"convert": convert, "logits": logits}[sys.argv[1]](json.load(file))
