"""`model.generate` with a method inside: if everything is kept, transformers' own `generate` is
the oracle.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
    pipeline,
)

import lazyllm
from lazyllm.check.invariants import runs_batches_row_by_row
from lazyllm.integrations.transformers_generate import REFUSED, LazyGenerateOutput, check_options
from lazyllm.methods import Baseline, Lazy, Method
from tests.helpers import Waits
from tests.lazyllm.methods.method_matrix import PRUNING
from tests.reference import random_model

MODEL = random_model("llama", 5, num_layers=4)
MODEL.generation_config.pad_token_id = 0
MODEL.generation_config.eos_token_id = None
KEEP, PRUNE = Lazy({1: 1.0, 3: 1.0}), Lazy({1: 0.6, 3: 0.5})
LONG = [7, 7, 12, 60, 5, 17, 33, 2, 90, 11, 8]
WIDTH = len(LONG)


def ids_of(prompt: list[int]) -> torch.Tensor:
    return torch.tensor([prompt])


def ours(method: Method, seed: int = 0, **options: Any) -> Any:
    with lazyllm.using(MODEL, method):
        return theirs(seed, **options)


def theirs(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return MODEL.generate(ids_of(LONG), **{"max_new_tokens": 8, **options})


FREE = theirs()[0, WIDTH:].tolist()  # greedy decoding's answer to LONG
SAMPLED = {"do_sample": True, "temperature": 3.0, "top_k": 0}

# options of `generate`; each must change the output, or is listed as one that does not
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"do_sample": True, "temperature": 3.0},
    "top_k": {**SAMPLED, "top_k": 5},
    "top_p": {**SAMPLED, "top_p": 0.3},
    "top_h": {**SAMPLED, "top_h": 0.5},
    "min_p": {**SAMPLED, "min_p": 0.5},
    "typical_p": {**SAMPLED, "typical_p": 0.3},
    "epsilon_cutoff": {**SAMPLED, "epsilon_cutoff": 0.02},
    "eta_cutoff": {**SAMPLED, "eta_cutoff": 0.3},
    "renormalize_logits": {"renormalize_logits": True},
    "repetition_penalty": {"repetition_penalty": 5.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 9.0},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[FREE[0]]]},
    "sequence_bias": {"sequence_bias": [[[FREE[0]], -9.0]]},
    "suppress_tokens": {"suppress_tokens": [FREE[0]]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [FREE[0]]},
    "forced_eos_token_id": {"forced_eos_token_id": 42},
    "eos_token_id": {"eos_token_id": FREE[2]},
    "eos_token_id, several": {"eos_token_id": [96, FREE[1]]},
    "min_new_tokens": {"eos_token_id": FREE[0], "min_new_tokens": 3},
    "min_length": {"eos_token_id": FREE[0], "min_length": WIDTH + 4},
    "max_length": {"max_length": WIDTH + 3, "max_new_tokens": None},
    "max_time": {"max_time": 0.0},
    "exponential_decay_length_penalty": {"eos_token_id": 42,
    "exponential_decay_length_penalty": (2, 9.0)},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=9.0)},
    "watermarking_config, SynthID": {
        "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 9, 4]),
        "do_sample": True
    },
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda row, ids: [1 + row, 3, 4, int(ids[-1]) % 50]
    },
    "logits_processor": {
        "logits_processor": LogitsProcessorList([lambda ids, scores: scores.roll(ids.shape[1], 1)])
    },
    "stopping_criteria": {
        "stopping_criteria": StoppingCriteriaList(
            [lambda ids, scores: torch.tensor([ids.shape[1] > WIDTH + 4])]
        )
    },
    "a criterion in place of max_new_tokens": {
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(WIDTH + 2)])
    },
    "remove_invalid_values": {"remove_invalid_values": True},
    "forced_bos_token_id": {"forced_bos_token_id": 4},
    "bos_token_id": {"bos_token_id": 4},
    "pad_token_id": {"pad_token_id": 4},
}  # fmt: skip
CHANGE_NOTHING = {"remove_invalid_values", "forced_bos_token_id", "bos_token_id", "pad_token_id"}


def assert_same(out: Any, expected: Any) -> None:
    """Tokens exactly; scores and logits to the last bits of float32, as products of one row
    round differently.
    """
    assert torch.equal(out.sequences, expected.sequences)
    for name in ("scores", "logits"):
        found, wanted = getattr(out, name), getattr(expected, name)
        assert len(found) == len(wanted)
        for ours, other in zip(found, wanted, strict=True):
            assert ours.dtype == other.dtype == torch.float32
            torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-6)


RETURNED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.mark.parametrize("name", OPTIONS)
def test_option_is_transformers_own(name: str) -> None:
    options = OPTIONS[name]
    for method in (Baseline(), KEEP):
        assert_same(ours(method, **options, **RETURNED), theirs(**options, **RETURNED))
    sampling = {key: value for key, value in options.items() if key == "do_sample"}
    plain, kept = theirs(**sampling, **RETURNED), theirs(**options, **RETURNED)
    changed = len(plain.scores) != len(kept.scores) or not torch.equal(
        plain.scores[-1], kept.scores[-1]
    )
    assert changed != (name in CHANGE_NOTHING)


@pytest.mark.parametrize("method", PRUNING.values(), ids=PRUNING.keys())
def test_every_method_generates_as_in_the_library(method: Method) -> None:
    runs_batches_row_by_row(MODEL, method, LONG)


def test_sample_is_transformers_own_after_the_same_seed() -> None:
    for seed in range(5):
        assert torch.equal(ours(KEEP, seed, **SAMPLED), theirs(seed, **SAMPLED))
    assert len({tuple(ours(PRUNE, seed, **SAMPLED)[0].tolist()) for seed in range(5)}) == 5


def test_processors_and_criteria_see_the_same_as_in_transformers() -> None:
    """Ordinary tensors, into which many processors write."""

    def seen_by(generate: Callable[..., Any]) -> list[tuple[list[int], torch.Tensor]]:
        calls = []

        def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            assert (ids.is_inference(), scores.is_inference(), torch.is_grad_enabled()) == (
                False,
                False,
                False,
            )
            calls.append((ids.tolist(), scores.clone()))
            scores[:, 0] = -1e9
            return scores

        def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            calls.append((ids.tolist(), torch.tensor(len(scores))))
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        inside = {"logits_processor": LogitsProcessorList([processor])}
        generate(**inside, stopping_criteria=StoppingCriteriaList([criterion]), **RETURNED)
        return calls

    found = seen_by(partial(ours, KEEP))
    assert len(found) == 16
    for (ids, scores), (their_ids, their_scores) in zip(found, seen_by(theirs), strict=True):
        assert ids == their_ids
        torch.testing.assert_close(scores, their_scores, rtol=1e-6, atol=1e-6)


def test_processor_that_calls_the_model_is_refused() -> None:
    processors = LogitsProcessorList([lambda ids, scores: scores + MODEL(ids).logits[:, -1]])
    with pytest.raises(RuntimeError, match="give it another model"):
        ours(PRUNE, logits_processor=processors)
    assert not MODEL._forward_pre_hooks
    assert torch.equal(theirs(), theirs())


class Put:
    """A streamer that records its input."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


def test_streamers_get_the_same_as_in_transformers() -> None:
    expected, found = Put(), Put()
    theirs(streamer=expected)
    assert len(expected.got) == 10
    with lazyllm.using(MODEL, KEEP):
        MODEL.generate(ids_of(LONG), max_new_tokens=8, streamer=found)
        assert found.got == expected.got


TEXT = "entry zanur lantern copper. the old house was quiet. Question: entry zanur"


def test_stop_strings(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    inputs = tokenizer(TEXT, return_tensors="pt")
    free = model.generate(**inputs, max_new_tokens=6)
    word = tokenizer.decode(free[0, inputs.input_ids.shape[1] + 1]).strip()
    options = {"stop_strings": word, "tokenizer": tokenizer, "max_new_tokens": 6}
    expected = model.generate(**inputs, **options)
    assert expected.shape[1] < free.shape[1]
    with lazyllm.using(model, Baseline()):
        assert torch.equal(model.generate(**inputs, **options), expected)
        with pytest.raises(ValueError, match="tokenizer"):
            model.generate(**inputs, stop_strings=word, max_new_tokens=6)
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, word)])
    with lazyllm.using(model, Baseline()):
        assert torch.equal(
            model.generate(**inputs, stopping_criteria=criteria, max_new_tokens=6), expected
        )
        with pytest.raises(ValueError, match="give them to generate itself"):
            model.generate(
                **inputs, generation_config=GenerationConfig(stop_strings=word), tokenizer=tokenizer
            )


def test_pipeline_answers_with_the_method(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    method = Lazy({2: 0.5, 5: 0.5})
    expected = lazyllm.generate(model, tokenizer(TEXT).input_ids, method, 6)
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    with lazyllm.using(model, method):
        found = pipe(TEXT, **options)
    assert found[0]["generated_text"] == tokenizer.decode(
        expected.token_ids, skip_special_tokens=True
    )


def state_of(model: Any) -> tuple[Any, ...]:
    hooks = [
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    ]
    return (
        type(model),
        sorted(vars(model)),
        model.config.to_dict(),
        model.generation_config.to_dict(),
        hooks,
    )


def test_using_leaves_the_model_as_it_was() -> None:
    model = random_model("qwen3", 1, num_layers=3)
    before, plain = state_of(model), model.generate(ids_of(LONG), max_new_tokens=4)
    with lazyllm.using(model, PRUNE_3) as same:
        assert same is model
        inner = model.generate(ids_of(LONG), max_new_tokens=4, return_dict_in_generate=True)
        assert isinstance(inner, LazyGenerateOutput)
        assert inner.generation.pct_prompt_tokens_computed < 100
        with lazyllm.using(model, Baseline()):
            assert torch.equal(model.generate(ids_of(LONG), max_new_tokens=4), plain)
        assert torch.equal(model.generate(ids_of(LONG), max_new_tokens=4), inner.sequences)
        custom = model.generate(
            ids_of(LONG), max_new_tokens=4, custom_generate=lambda *_, **__: "a call's own"
        )
        assert custom == "a call's own"
        assert not torch.equal(inner.sequences, plain)
    assert state_of(model) == before
    assert torch.equal(model.generate(ids_of(LONG), max_new_tokens=4), plain)

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise LookupError

    with pytest.raises(LookupError), lazyllm.using(model, PRUNE_3):
        model.generate(ids_of(LONG), max_new_tokens=4, logits_processor=LogitsProcessorList([fail]))
    assert state_of(model) == before
    # a user's own value stays, and what it calls prunes
    model.generate = wrapper = lambda *args, **kwargs: type(model).generate(model, *args, **kwargs)  # type: ignore[method-assign]
    with lazyllm.using(model, PRUNE_3):
        assert torch.equal(model.generate(ids_of(LONG), max_new_tokens=4), inner.sequences)
    assert model.generate is wrapper


PRUNE_3 = Lazy({1: 0.5, 2: 0.5})


def test_generate_returns_tokens_scores_and_generations() -> None:
    out = ours(PRUNE, **RETURNED)
    assert isinstance(out, LazyGenerateOutput)
    alone = lazyllm.generate(MODEL, LONG, PRUNE, 8, ())
    assert (out.generation.token_ids, out.generation.selected) == (alone.token_ids, alone.selected)
    assert (out.generation.computed == alone.computed).all()
    assert torch.equal(out.generation.first_logits, alone.first_logits)
    assert (out.past_key_values, out.attentions, out.hidden_states) == (None, None, None)
    for tensor in (out.sequences, *out.scores, *out.logits):
        assert not tensor.is_inference()  # so that a loss may be computed on them
    bare = ours(PRUNE, return_dict_in_generate=True)
    assert (bare.scores, bare.logits) == (None, None)
    assert torch.equal(ours(PRUNE), bare.sequences)


def test_token_costs_one_transfer() -> None:
    def waits(steps: int, **options: Any) -> Counter[str]:
        with Waits() as found:
            ours(Baseline(), max_new_tokens=steps, **options)
        return Counter(found.found)

    for options in ({}, {**SAMPLED, "top_p": 0.9, "eos_token_id": 96}):
        more = waits(7, **options) - waits(1, **options)
        assert more == {"tolist": 6}


# of refused modes and caches, or what no decoding loop reads
INERT = {
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
    "assistant_lookbehind",
    "cache_config", "constraints", "continuous_batching_config", "decoder_start_token_id",
    "disable_compile",
    "diversity_penalty", "dola_layers", "early_stopping", "force_words_ids", "length_penalty",
    "low_memory",
    "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups", "penalty_alpha", "prompt_lookup_num_tokens", "speculation_type",
    "target_lookbehind",
    "transformers_version", "use_mtp",
}  # fmt: skip


def test_every_option_of_this_release_is_honoured_refused_or_inert() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    tested = {name.split(",")[0] for name in OPTIONS} | {
        "do_sample",
        "max_new_tokens",
        "stop_strings",
    }
    tested |= {"num_return_sequences", "output_scores", "output_logits", "return_dict_in_generate"}
    assert fields <= tested | REFUSED.keys() | INERT
    assert [name for options in OTHER for name in options] == [*REFUSED]
    assert not INERT & (tested | REFUSED.keys())


OTHER: list[dict[str, Any]] = [
    {"cache_implementation": "static"}, {"compile_config": {}}, {"guidance_scale": 1.5},
    {"is_assistant": True},
    {"num_beams": 2}, {"output_attentions": True}, {"output_hidden_states": True},
    {"prefill_chunk_size": 4},
    {"token_healing": True}, {"use_cache": False},
]  # fmt: skip
MODES: list[dict[str, Any]] = [
    {"constraints": [1]}, {"force_words_ids": [[1]]}, {"penalty_alpha": 0.6, "top_k": 4},
    {"dola_layers": "low"},
    {"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 2}, {"use_mtp": True},
]  # fmt: skip


@pytest.mark.parametrize("options", [*OTHER, *MODES], ids=str)
def test_option_is_refused(options: dict[str, Any]) -> None:
    config, (name, *_) = GenerationConfig(), options
    for accepted in REFUSED.get(name, [()])[0]:
        setattr(config, name, accepted)
        check_options(config)
    for key, value in options.items():
        setattr(config, key, value)
    named = "generation mode .*" if options in MODES else f"{name}=.*"
    with pytest.raises(ValueError, match=f"{named} is not supported with a pruning method: "):
        check_options(config)


def filled_cache() -> DynamicCache:
    return MODEL(ids_of(LONG[:3]), use_cache=True).past_key_values


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"inputs": None, "inputs_embeds": torch.zeros(1, 3, MODEL.config.hidden_size)},
            "give input_ids",
        ),
        ({"past_key_values": filled_cache()}, "past_key_values is not supported"),
        ({"past_key_values": DynamicCache()}, "past_key_values is not supported"),
        ({"position_ids": torch.arange(WIDTH)[None] + 2}, "position_ids"),
        ({"labels": ids_of(LONG)}, "labels: not passed"),
        ({"inputs": ids_of([1, 97])}, "the model knows 0 to 96"),
        (
            {"inputs": ids_of([1, 2, 3]), "attention_mask": ids_of([0, 1, 1])},
            "leave out the padding",
        ),
        (
            {"inputs": ids_of([1, 2, 3]), "attention_mask": ids_of([1, 0, 1])},
            "leave out the padding",
        ),
        (
            {"inputs": ids_of([1, 2, 3]), "attention_mask": ids_of([1, 1, 0])},
            "leave out the padding",
        ),
        (
            {"inputs": ids_of([1, 2, 0])},
            "or give a mask if the padding token is part of the prompt",
        ),
        (
            {"inputs": torch.tensor([[5, 6], [5, 7]])},
            "one prompt at a time, got 2 rows: .* lazyllm.generate_many",
        ),
        (
            {"num_return_sequences": 2, "do_sample": True},
            "got 2 rows: call generate for each prompt and each sample",
        ),
        ({"num_beams": 2}, "pruning method"),
        ({"penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True}, "pruning method"),
        ({"prompt_lookup_num_tokens": 3}, "pruning method"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "pruning method"),
        ({"cache_implementation": "paged"}, "cache_implementation='paged' is not supported"),
        ({"assistant_model": MODEL}, "assistant_model is not supported"),
        ({"synced_gpus": True}, "synced_gpus"),
    ],
)
def test_generate_refuses_inputs_and_options(given: dict[str, Any], message: str) -> None:
    with lazyllm.using(MODEL, PRUNE), pytest.raises(ValueError, match=message):
        MODEL.generate(**{"inputs": ids_of(LONG), "max_new_tokens": 3, **given})


def test_using_refuses_a_wrapper_whose_own_model_would_generate() -> None:
    wrapper: Any = torch.nn.Sequential(MODEL)
    with (
        pytest.raises(TypeError, match=r"got Sequential: .* give the model inside"),
        lazyllm.using(wrapper, PRUNE),
    ):
        pass


def test_call_of_the_model_itself_is_said_to_be_unpruned(caplog) -> None:
    model = random_model("llama", 7, num_layers=4)
    with torch.no_grad(), lazyllm.using(model, PRUNE):
        model.generate(ids_of(LONG), max_new_tokens=2)
        lazyllm.generate(model, LONG, PRUNE, 2)
        assert not caplog.records
        for _ in range(2):
            model(ids_of(LONG))
    with torch.no_grad():
        model(ids_of(LONG))
    assert [record.getMessage() for record in caplog.records] == [
        "LlamaForCausalLM(...) runs unpruned: within `using` only its `generate` prunes"
    ]


def test_using_refuses_bad_methods() -> None:
    entered = list[str]()
    with pytest.raises(TypeError, match="expected a method such as"), lazyllm.using(MODEL, Lazy):  # type: ignore[arg-type]
        entered.append("a class")
    lacking = Lazy({5: 0.5})
    with (
        pytest.raises(ValueError, match="only 4 layers") as caught,
        lazyllm.using(MODEL, lacking),
    ):
        entered.append("a layer that is not there")
    assert not entered
    assert "\n" not in str(caught.value)
    with pytest.raises(FloatingPointError, match="every token is forbidden"):
        ours(
            PRUNE, logits_processor=LogitsProcessorList([lambda ids, scores: scores * float("nan")])
        )


def test_example_of_the_package_runs_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    """The example of `help(lazyllm)` and the README finds the answer in its prompt."""
    assert lazyllm.__doc__ is not None
    exec(compile(lazyllm.__doc__.split("\n\n", 1)[1], "lazyllm.__doc__", "exec"), {})
    assert capsys.readouterr().out.split("Question: entry zanur")[1].strip() == "lantern copper."
