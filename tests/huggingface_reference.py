"""Tiny random models of `transformers`, and the logits and gradients that it computes from them.

`python tests/huggingface_reference.py` makes `tests/data/huggingface` and `tests/data/peft` again,
or with names of their folders those alone (transformers 5, peft and torch, which the tests can do
without: they read what is kept there).
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

FOLDER = Path(__file__).parent / "data" / "huggingface"
# All sizes differ, so that no transposed or exchanged kernel fits by chance.
SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rope_theta": 100.0,  # so that far positions matter within a short sequence
}
# Of the four rotated pairs two are slowed down in part.
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "original_max_position_embeddings": 16,
}
_OF_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 5,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {**YARN, "rope_theta": 100.0},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
    },
    "DeepseekV2": {**_OF_DEEPSEEK, "q_lora_rank": None, "num_experts_per_tok": 3},
    "DeepseekV3": {
        **_OF_DEEPSEEK,
        "q_lora_rank": 11,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_mtp_layers": 0,
    },
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 24},
    "Glm4Moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "head_dim": 8,
        "num_mtp_layers": 0,
    },
    "GptOss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "rope_scaling": {**YARN, "truncate": False, "mscale": None, "mscale_all_dim": None},
    },
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 24},
}
# Of the three pairs of a head, one keeps its angles, one is between, and one is slowed in full.
LLAMA3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.3,
}
# What a kept model has besides the sizes.
CHANGES: dict[str, dict[str, Any]] = {
    "mixtral_empty": {"num_local_experts": 5},
    "mixtral_single": {"num_experts_per_tok": 1},
    "llama3_1": {"rope_scaling": LLAMA3_1},
    "mistral": {"sliding_window": None},
    "qwen3": {"tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3_yarn": {
        "rope_scaling": {**YARN, "mscale": None, "mscale_all_dim": None},
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "llama_yarn": {
        "rope_scaling": {**YARN, "truncate": False},
        "attention_bias": True,
        "hidden_size": 24,
    },
    "deepseek_v2_groups": {
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
    },
    "moonlight": {
        "rms_norm_eps": 1e-3,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
    },
    "olmo2": {"hidden_size": 24, "num_hidden_layers": 2},
    "gemma2": {"hidden_size": 24, "sliding_window": 5, "query_pre_attn_scalar": 7, **_CAPS},
    "gemma3": {
        "hidden_size": 24,
        "sliding_window": 5,
        "query_pre_attn_scalar": 7,
        "num_hidden_layers": 6,
        "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
        "rope_theta": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        },
    },
    "glm4_moe": {"attention_bias": True, "use_qk_norm": True},
    "granite": {"hidden_size": 24, **_MULTIPLIERS},
    "granite_moe": _MULTIPLIERS,
    "phi3": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "head_dim": 8,
        "partial_rotary_factor": 0.5,
        "sliding_window": 5,
    },
}
# Name of the folder: the class, the dtype of weights, and how it is saved.
KEPT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", "float32", {}),
    "mixtral_empty": ("Mixtral", "float32", {}),
    "mixtral_single": ("Mixtral", "float32", {}),
    "mixtral_fused": ("Mixtral", "float32", {"save_original_format": False}),
    "mixtral_sharded": ("Mixtral", "bfloat16", {"max_shard_size": "12KB"}),
    "llama": ("Llama", "float32", {}),
    "llama3_1": ("Llama", "float32", {}),
    "mistral": ("Mistral", "float32", {}),
    "qwen3": ("Qwen3", "float32", {}),
    "qwen3_moe": ("Qwen3Moe", "float32", {}),
    "deepseek_v2": ("DeepseekV2", "float32", {}),
    "deepseek_v3": ("DeepseekV3", "float32", {}),
    "qwen2": ("Qwen2", "float32", {}),
    "qwen3_yarn": ("Qwen3", "float32", {}),
    "llama_yarn": ("Llama", "float32", {}),
    "deepseek_v2_groups": ("DeepseekV2", "float32", {}),
    "moonlight": ("DeepseekV3", "float32", {}),
    "olmo2": ("Olmo2", "float32", {}),
    "olmoe": ("Olmoe", "float32", {}),
    "gemma2": ("Gemma2", "float32", {}),
    "gemma3": ("Gemma3", "float32", {}),
    "gpt_oss": ("GptOss", "float32", {}),
    "glm4_moe": ("Glm4Moe", "float32", {}),
    "granite": ("Granite", "float32", {}),
    "granite_moe": ("GraniteMoe", "float32", {}),
    "phi3": ("Phi3", "float32", {}),
}
OF_TEXT = {"Gemma3": "Gemma3Text"}  # whose class of configs has another name


def random_model(kind: str, *, seed: int, **changes: Any) -> Any:
    """A model of `transformers`, float32, of class `<kind>ForCausalLM`, with large weights."""
    import torch
    import transformers

    torch.manual_seed(seed)
    sizes = {**SIZES, **EXPERTS.get(kind, {}), **changes}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = getattr(transformers, f"{OF_TEXT.get(kind, kind)}Config")(**tokens, **sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            around_one = parameter.ndim == 1 and not kind.startswith("Gemma")
            parameter.normal_(1.0 if around_one else 0.0, 0.3)
        for name, buffer in model.named_buffers():  # which chooses experts in a DeepSeek-V3
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    return model.eval()


# The kept models of which the gradients of `loss_of` are kept, too: a model of its own, in a folder
# inside, whose values are the gradients.
WITH_GRADIENTS = ("mixtral", "mixtral_empty", "mixtral_single")


def unbalance(model: Any, name: str) -> None:
    """Makes routers that never choose the last of five experts, or always the second of four.

    The logits of `mixtral_empty` are a, −a, b, −b and 0, of which two are above 0. In
    `mixtral_single` every token has a large first number, by which one expert stands out.
    """
    import torch

    with torch.no_grad():
        for layer in model.model.layers:
            rows = layer.mlp.gate.weight
            if name == "mixtral_empty":
                rows[1], rows[3], rows[4] = -rows[0], -rows[2], 0.0
            elif name == "mixtral_single":
                layer.post_attention_layernorm.weight[0] = 1.0
                rows[:, 0] = torch.tensor([-2.0, 2.0, -2.0, -2.0])
        if name == "mixtral_single":
            model.model.embed_tokens.weight[:, 0] = 10.0


def keep_gradients(model: Any, tokens: np.ndarray, folder: Path) -> None:
    """Saves the gradients of the mean loss of the next token, as a model with these as values."""
    import torch

    model.set_attn_implementation("eager")
    ids = torch.from_numpy(tokens)
    logits = model(ids).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """`[batch, seq, vocab]` in float32, computed in float32, attention in its plainest form."""
    import torch

    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model.float()(torch.from_numpy(tokens)).logits.numpy()


def random_tokens(*, seed: int) -> np.ndarray:
    """Token ids `[batch, seq]` for a model of `SIZES`."""
    return np.random.default_rng(seed).integers(SIZES["vocab_size"], size=(2, 20))


# A folder whose config ties the head to the table, and whose tensors have another head.
OWN_HEAD = "llama_own_head"


def keep_own_head(folder: Path) -> None:
    """Saves it, with the logits that transformers computes from what it reads there."""
    from transformers import AutoModelForCausalLM

    random_model("Llama", seed=0, tie_word_embeddings=True, num_hidden_layers=1).save_pretrained(
        folder
    )
    (folder / "generation_config.json").unlink()
    head = np.random.default_rng(0).normal(size=(24, 16)).astype(np.float32)
    tensors = {**load_file(folder / "model.safetensors"), "lm_head.weight": head}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = random_tokens(seed=1)
    found = logits_of(AutoModelForCausalLM.from_pretrained(folder), tokens)
    np.savez(folder / "reference.npz", tokens=tokens, logits=found)


# Adapters by name: the kept model that each is for, and what it has besides its rank.
OF_PEFT = FOLDER.parent / "peft"
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "patterns": (
        "llama",
        {
            "target_modules": [*_ATTENTION, "gate_proj", "up_proj", "down_proj"],
            "use_rslora": True,
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 3},
            "alpha_pattern": {"layers.2.mlp.up_proj": 12},
            "fan_in_fan_out": True,
        },
    ),
    "joint": ("phi3", {"target_modules": ["qkv_proj", "o_proj"], "modules_to_save": ["lm_head"]}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "biases": ("llama_yarn", {"target_modules": ["q_proj", "k_proj"], "bias": "lora_only"}),
    "multipliers": ("granite", {"target_modules": "all-linear"}),
    "latent": ("deepseek_v3", {"target_modules": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]}),
    "regular_expression": ("qwen3", {"target_modules": r".*\.(0|2)\.self_attn\.(q|v)_proj"}),
}


def keep_adapter(name: str) -> None:
    """Saves an adapter of PEFT and the logits of its model with it."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    of, options = ADAPTERS[name]
    base = AutoModelForCausalLM.from_pretrained(FOLDER / of)
    torch.manual_seed(0)
    options = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **options}
    model = peft.get_peft_model(base, peft.LoraConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.15)
    shutil.rmtree(OF_PEFT / name, ignore_errors=True)
    model.save_pretrained(OF_PEFT / name)
    (OF_PEFT / name / "README.md").unlink()
    file = OF_PEFT / name / "adapter_config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "base_model_name_or_path": of}, indent=2))
    tokens = random_tokens(seed=1)
    model.eval().base_model.model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.numpy()
    np.savez(OF_PEFT / name / "reference.npz", tokens=tokens, logits=logits)


def main(*names: str) -> None:
    import torch

    for name in names or (*KEPT, OWN_HEAD, *ADAPTERS):
        if name in ADAPTERS:
            keep_adapter(name)
            continue
        if name == OWN_HEAD:
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            keep_own_head(FOLDER / name)
            continue
        kind, dtype, options = KEPT[name]
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        model = random_model(kind, seed=0, **CHANGES.get(name, {}))
        if name in ("mixtral_empty", "mixtral_single"):
            unbalance(model, name)
        for parameter in model.parameters():  # and not buffers, such as the rotary frequencies
            parameter.data = parameter.data.to(getattr(torch, dtype))
        model.save_pretrained(FOLDER / name, **options)
        (FOLDER / name / "generation_config.json").unlink()
        tokens = random_tokens(seed=1)
        np.savez(FOLDER / name / "reference.npz", tokens=tokens, logits=logits_of(model, tokens))
        if name in WITH_GRADIENTS:
            keep_gradients(model, tokens, FOLDER / name / "gradients")
        print(name, json.loads((FOLDER / name / "config.json").read_text())["transformers_version"])


if __name__ == "__main__":
    main(*sys.argv[1:])
