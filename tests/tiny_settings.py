"""Settings of models that the tests of several parts build."""

TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LLAMA_2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "vocab_size": 32000,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ONE_OF_EACH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
# multi-head latent attention: of each head 32 dimensions stand still before the 16 that rotate
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_VISION = {"depth": 1, "num_heads": 2, "patch_size": 4}
_QWEN_IDS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
_INTERLEAVED = {**_MROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
_PART_OF_A_HEAD = {**_INTERLEAVED, "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}
MULTIMODAL = {
    "llava": {  # a language model under text_config
        "text_config": {**TINY, "model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model", **_VISION, "image_size": 8, "patch_size": 4},
        "image_token_id": 5,
    },
    "qwen2_vl": {  # mrope: three positions per token
        "text_config": {**TINY, "rope_parameters": _MROPE},
        "vision_config": {**_QWEN_VISION, "embed_dim": 16, "hidden_size": 64},
        **_QWEN_IDS,
    },
    "qwen3_vl": {  # interleaved mrope
        "text_config": {**TINY, "head_dim": 32, "rope_parameters": _INTERLEAVED},
        "vision_config": {
            **_QWEN_VISION,
            **{"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 64},
            **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        **_QWEN_IDS,
    },
    "qwen3_5": {  # interleaved mrope in part of a head, in one of two layers; with a layer that drafts
        "text_config": {
            **{**TINY, "head_dim": 32, "rope_parameters": _PART_OF_A_HEAD},
            **{"layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2},
            **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
            **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),  # as vLLM's kernel for CPUs needs
            "mtp_num_hidden_layers": 1,
        },
        "vision_config": {
            **{**_QWEN_VISION, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 64},
            **{"num_position_embeddings": 16, "deepstack_visual_indexes": []},
        },
        **_QWEN_IDS,
    },
    "llama4": {  # as a causal LM, transformers builds only its text part; the text part has a head of its own
        "text_config": {**TINY, "head_dim": 32, **EXPERTS, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 2},
        "vision_config": {
            **_VISION,
            **{"intermediate_size": 64, "image_size": 8, "patch_size": 4},
            **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 64),
        },
        "image_token_index": 5,
    },
}
