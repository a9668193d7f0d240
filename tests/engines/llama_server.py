"""Runs where xllamacpp and gguf are: writes a demo-like Llama as a GGUF, and serves one with llama-server's own code.

python llama_server.py convert JOB.json             weights.npz, config.json, tokenizer.json -> a GGUF
python llama_server.py from-folder LLAMA.CPP DIR ...  the same by llama.cpp's converter, told what the tokenizer is
python llama_server.py serve llama-server -m ...    the flags of a command line; prints the address, ends with stdin
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
    """job: config (of the Llama), weights (npz), tokenizer (tokenizer.json), model (GGUF to write), quantization (F32,
    Q8_0, Q4_1), metadata (key -> string, int or float), tensors (name -> list of float). Metadata and tensors are what
    a converter would store of the scaling."""
    import gguf

    config, kind = job["config"], gguf.GGMLQuantizationType[job["quantization"]]
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
    add_tokenizer(writer, job["tokenizer"])
    for key, value in job["metadata"].items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    for name, tensor in np.load(job["weights"]).items():
        name, tensor = named(name, tensor, config)
        if tensor.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    for name, values in job["tensors"].items():
        writer.add_tensor(name, np.array(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer, path: str) -> None:
    """A byte-level BPE."""
    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        content = json.load(file)
    vocabulary = dict(content["model"]["vocab"]) | {token["content"]: token["id"] for token in content["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    special = {token["id"] for token in content["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types([3 if number in special else 1 for number in sorted(vocabulary.values())])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(min(special, default=0))
    writer.add_eos_token_id(min(special, default=0))


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


def from_folder(source: str, words: list[str]) -> None:
    """source: the folder of llama.cpp. words: the command line of convert_hf_to_gguf.py."""
    sys.path[:0] = [source, f"{source}/gguf-py"]
    import convert_hf_to_gguf
    from conversion import base

    base.TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", *words]
    convert_hf_to_gguf.main()


def serve(words: list[str]) -> None:
    """words: a llama-server command line. Without -fa on the KV cache is float32, so that rounding hides nothing."""
    import xllamacpp

    flags = dict(zip(words[1::2], words[2::2], strict=True))
    params = xllamacpp.CommonParams()
    params.model.path = flags.pop("-m")
    params.n_ctx, params.n_parallel = int(flags.pop("-c")), int(flags.pop("-np"))
    params.port, params.warmup, params.fit_params = 0, False, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(flags.pop("-t", 1))
    if flags.pop("-fa", "off") == "off":
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if "--rope-scaling" in flags:
        name = flags.pop("--rope-scaling").upper()
        params.rope_scaling_type = xllamacpp.llama_rope_scaling_type[f"LLAMA_ROPE_SCALING_TYPE_{name}"]
    if "--rope-scale" in flags:
        params.rope_freq_scale = 1 / float(flags.pop("--rope-scale"))
    if "--yarn-orig-ctx" in flags:
        params.yarn_orig_ctx = int(flags.pop("--yarn-orig-ctx"))
    for flag, value in flags.items():
        setattr(params, flag.removeprefix("--").replace("-", "_"), float(value))
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2:])
    elif sys.argv[1] == "from-folder":
        from_folder(sys.argv[2], sys.argv[3:])
    else:
        with open(sys.argv[2], encoding="utf-8") as file:  # noqa: PTH123
            convert(json.load(file))
