"""The options of transformers' `GenerationConfig`, as a generation with a method takes them: honoured or refused.

Every field is in one of three tables; a test goes through the fields of the installed release by name.
"""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

# Options that transformers makes into logits processors and stopping criteria, or that are read here.
HONOURED = frozenset(
    {"bad_words_ids", "begin_suppress_tokens", "bos_token_id", "do_sample", "encoder_no_repeat_ngram_size"}
    | {"encoder_repetition_penalty", "eos_token_id", "epsilon_cutoff", "eta_cutoff"}
    | {"exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "max_length"}
    | {"max_new_tokens", "max_time", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size"}
    | {"num_return_sequences", "output_logits", "output_scores", "pad_token_id", "remove_invalid_values"}
    | {"renormalize_logits", "repetition_penalty", "return_dict_in_generate", "sequence_bias", "stop_strings"}
    | {"suppress_tokens", "temperature", "top_h", "top_k", "top_p", "typical_p", "watermarking_config"}
)

_ONE_SEQUENCE = "one token is chosen at a time for one sequence: leave it out, and sample (do_sample=True) for variety"
_OWN_CACHE = "a pruned generation has a KV cache of its own, made for it: leave it out"
_NOT_KEPT = "the layers see different tokens, and nothing of it is kept: call model(sequences, ...) afterwards"

# Options that ask for what a pruned generation cannot do: the values that do not ask for it, and what to do instead.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "assistant_early_exit": ((None,), _ONE_SEQUENCE),
    "cache_config": ((None,), _OWN_CACHE),
    "cache_implementation": ((None, "dynamic"), _OWN_CACHE),
    "compile_config": ((None,), "the number of tokens changes from layer to layer and step to step: leave it out"),
    "constraints": ((None,), _ONE_SEQUENCE),
    "diversity_penalty": ((None, 0.0), _ONE_SEQUENCE),
    "dola_layers": ((None,), "layers run on different tokens and are not compared: leave it out"),
    "force_words_ids": ((None,), _ONE_SEQUENCE),
    "guidance_scale": ((None, 1), "guidance runs the model a second time, unpruned: leave it out"),
    "is_assistant": ((None, False), "a pruned generation cannot draft for another model"),
    "low_memory": ((None, False), "it is an option of beam and contrastive search: leave it out"),
    "max_cache_len": ((None,), _OWN_CACHE),
    "num_beam_groups": ((None, 1), _ONE_SEQUENCE),
    "num_beams": ((None, 1), _ONE_SEQUENCE),
    "output_attentions": ((None, False), _NOT_KEPT),
    "output_hidden_states": ((None, False), _NOT_KEPT),
    "penalty_alpha": ((None, 0), _ONE_SEQUENCE),
    "prefill_chunk_size": ((None,), "the newest token's attention to the whole prompt is what prunes: leave it out"),
    "prompt_lookup_num_tokens": ((None,), _ONE_SEQUENCE),
    "token_healing": ((None, False), "it changes the prompt behind the attention mask: heal the prompt before"),
    "use_cache": ((None, True), "pruning works on the KV cache: set use_cache=True"),
    "use_mtp": ((None, False), _ONE_SEQUENCE),
}

# Options that only tune a mode which is refused by another option, or that no decoding loop reads.
INERT = frozenset(
    {"assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind"}
    | {"continuous_batching_config", "decoder_start_token_id", "disable_compile", "early_stopping"}
    | {"length_penalty", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule"}
    | {"speculation_type", "target_lookbehind", "transformers_version"}
)


def check_options(config: GenerationConfig, assistant_model: Any = None) -> None:
    """Refuse each generation option that a pruned generation would not honour. Raises ValueError."""
    if assistant_model is not None:  # before what transformers sets for it
        raise ValueError(f"an assistant_model does not go together with a pruning method: {_ONE_SEQUENCE}")
    for name, (accepted, instead) in REFUSED.items():
        value = getattr(config, name, None)
        if value not in accepted:
            raise ValueError(f"{name}={value!r} does not go together with a pruning method: {instead}")
    mode = config.get_generation_mode()
    if mode not in ("greedy_search", "sample"):
        raise ValueError(f"generation mode {mode.value} does not go together with a pruning method: {_ONE_SEQUENCE}")
    known, defaults = HONOURED | REFUSED.keys() | INERT, GenerationConfig()
    for name, default in vars(defaults).items():
        value = getattr(config, name, None)
        if name not in known and not name.startswith("_") and value not in (None, default):
            raise ValueError(f"{name}={value!r}: an option of a newer transformers, unknown here: leave it out")
