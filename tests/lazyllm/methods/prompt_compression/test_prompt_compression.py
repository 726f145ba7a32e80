"""Prompt compression: removable units, selected units and the resulting prompt, each against an
obvious version.
"""

import math
import random
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import lazyllm
from lazyllm.engine import generation
from lazyllm.engine.checks import check_same_as_model
from lazyllm.engine.flops import LayerShape
from lazyllm.methods import Baseline, PromptCompression
from lazyllm.methods.prompt_compression import droppable, most_informative, unit_means
from lazyllm.methods.support import other_models
from lazyllm.models.config import load_config
from lazyllm.spec import ModelSpec
from tests.lazyllm.methods.prompt_compression.test_scoring import slow
from tests.reference import random_model

BOS = 1
TEXT = (
    "Read this.\n\nThe cat sat on the mat. It was a very old mat!  Was it?\n    if cat:\n        "
    "sit(mat)\nA: the answer\nMore about cats here. No more.\n\nNow say what sat."
)
CONTEXT = (
    (TEXT.index("The cat"), TEXT.index("A: the")),
    (TEXT.index("More"), TEXT.index("\n\nNow")),
)


def words_tokenizer(pattern: str, text: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are what `pattern` finds in `text`, and single characters
    elsewhere.
    """
    backend = Tokenizer(models.WordLevel({}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")  # type: ignore[assignment]
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]  # type: ignore[attr-defined]
    vocabulary = {
        piece: number for number, piece in enumerate(["<unk>", "<s>", *dict.fromkeys(pieces)])
    }
    backend.model = models.WordLevel(vocabulary, unk_token="<unk>")  # type: ignore[assignment]
    backend.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")


# a word with the space before it, as Llama's do
TOKENIZER = words_tokenizer(r" ?\w+|\s|[^\w\s]", TEXT)


def text_prompt(text: str = TEXT, context=CONTEXT) -> lazyllm.Prompt:
    found = TOKENIZER(text, return_offsets_mapping=True, add_special_tokens=False)
    spans = ((0, 0), *map(tuple, found["offset_mapping"]))
    return lazyllm.Prompt(torch.tensor([BOS, *found["input_ids"]]), text, spans, context)


def model_of(architecture: str = "llama", attention: str = "sdpa", **settings):
    return random_model(
        architecture, 6, num_layers=3, attn_implementation=attention, bos_token_id=BOS, **settings
    )


def slow_droppable(prompt: lazyllm.Prompt) -> list[int]:
    """Character by character."""
    breaks = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
    found = []
    for position, (start, stop) in enumerate(prompt.spans[:-1]):
        goes = start < stop and not prompt.text[start:stop].isspace()
        for place in range(start, stop):
            line_so_far = prompt.text[: place + 1]
            for sign in breaks:
                line_so_far = line_so_far.rpartition(sign)[2]
            in_context = any(place in range(*span) for span in prompt.context)
            is_layout = prompt.text[place] in breaks or line_so_far.isspace()
            goes = goes and in_context and not is_layout
        if goes:
            found.append(position)
    return found


def test_droppable_tokens_are_those_character_by_character() -> None:
    draw = random.Random(0)
    some = []
    for _ in range(300):
        text = "".join(draw.choices("ab.  \t\n\r\u2028\x85\u3000é", k=draw.randint(1, 40)))
        cuts = sorted({0, len(text), *draw.choices(range(len(text) + 1), k=20)})
        spans = list(pairwise(cuts))
        # several tokens a character
        spans += [(start, stop) for start, stop in draw.sample(spans, len(spans) // 3)]
        spans = [(0, 0), *sorted(spans)]
        bounds = sorted(draw.sample(range(len(text) + 1), min(len(text) + 1, 4)))
        context = tuple(zip(bounds[::2], bounds[1::2], strict=False))
        prompt = lazyllm.Prompt(
            torch.zeros(len(spans), dtype=torch.long), text, tuple(spans), context
        )
        assert droppable(prompt).tolist() == slow_droppable(prompt)
        some += slow_droppable(prompt)
    assert len(some) > 300


def slow_choice(info: list[float], unit_of: list[int], budget: int) -> list[int]:
    """Positions, by sorting in Python: whole units, best mean first, the earlier one of equals."""
    members: dict[int, list[int]] = {}
    for position, unit in enumerate(unit_of):
        members.setdefault(unit, []).append(position)
    mean = {unit: sum(info[i] for i in tokens) / len(tokens) for unit, tokens in members.items()}
    kept: list[int] = []
    for unit in sorted(members, key=lambda unit: (-mean[unit], unit)):
        if len(kept) < budget:
            kept += members[unit]
    return sorted(kept)


def test_most_informative_units_are_those_of_sorting() -> None:
    draw = random.Random(1)
    for _ in range(300):
        c = draw.randint(1, 30)
        # many ties, exact in binary
        info = [draw.choice([0.0, 0.25, 0.5, 1.0, 2.0]) for _ in range(c)]
        unit_of = sorted(draw.choices(range(draw.choice([1, 5, 50])), k=c))
        budget = draw.randint(1, c)
        means = unit_means(np.array(info), np.array(unit_of))
        kept = most_informative(means, np.array(unit_of), budget).nonzero()[0].tolist()
        assert kept == slow_choice(info, unit_of, budget)
        each = most_informative(np.array(info), np.arange(c), budget)
        assert each.sum() == budget


SENTENCES = [
    "The cat sat on the mat. ", "It was a very old mat!  ", "Was it?\n", "    if cat:\n",
    "        sit(mat)\n",
    "More about cats here. ", "No more.",
]  # fmt: skip


def slow_units(prompt: lazyllm.Prompt, may_go: list[int], unit: str) -> list[int]:
    """The sentence that contains a token's last letter (the first may be the space before the
    sentence).
    """
    if unit == "token":
        return may_go
    places = [prompt.text.index(sentence) for sentence in SENTENCES]
    return [sum(place < prompt.spans[position][1] for place in places) for position in may_go]


def slow_kept(model, prompt: lazyllm.Prompt, keep: str, unit: str) -> list[int]:
    may_go = slow_droppable(prompt)
    ids = prompt.token_ids.tolist()
    info = dict(
        zip(
            range(may_go[0], may_go[-1] + 1),
            slow(model, ids[may_go[0] : may_go[-1] + 1], 512, BOS),
            strict=True,
        )
    )
    budget = math.ceil(Fraction(keep) * len(may_go))
    chosen = slow_choice(
        [info[position] for position in may_go], slow_units(prompt, may_go, unit), budget
    )
    stays = {may_go[index] for index in chosen}
    return [position for position in range(len(ids)) if position not in may_go or position in stays]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("unit", ["token", "sentence"])
@pytest.mark.parametrize("keep", ["0.2", "0.9"])
def test_model_runs_on_the_most_informative_rest(keep: str, unit: str, attention: str) -> None:
    model, prompt = model_of("qwen3", attention), text_prompt()
    method = PromptCompression(float(keep), unit)
    out = lazyllm.generate(model, prompt, method, 5, ())
    kept = out.selected[0][0]
    assert kept == slow_kept(model, prompt, keep, unit)
    c = len(slow_droppable(prompt))
    assert c == 30  # 7 and 7 and 3, 2 and 3 after an indentation, 5 and 3
    goes = len(prompt) - len(kept)
    least = math.ceil(Fraction(keep) * c)
    assert c - goes == least if unit == "token" else c - goes >= least
    assert goes > 0
    assert (out.computed == len(kept)).all()
    assert 0 < out.scoring_s < out.ttft_s
    rest = lazyllm.generate(model, prompt.token_ids[kept], Baseline(), 5, ())
    assert (out.token_ids, out.kv_bytes) == (rest.token_ids, rest.kv_bytes)
    assert torch.equal(out.first_logits, rest.first_logits)


@pytest.mark.parametrize("unit", ["token", "sentence"])
def test_prompt_with_nothing_to_drop_is_not_scored(unit: str) -> None:
    model = model_of()
    check_same_as_model(model)  # as `load_model` does: else the first generation would
    runs: list[int] = []
    hook = model.model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    without_context = text_prompt(context=())
    for prompt, method in (
        (text_prompt(), PromptCompression(1.0, unit)),
        (without_context, PromptCompression(0.5, unit)),
        # ceil(0.5 * 1) of one token
        (text_prompt("cat sat on", ((0, 3),)), PromptCompression(0.5, unit)),
    ):
        runs.clear()
        out = lazyllm.generate(model, prompt, method, 1, ())
        assert (len(runs), out.scoring_s) == (1, 0)
        assert out.computed.min() == len(prompt)
        assert torch.equal(
            out.first_logits, lazyllm.generate(model, prompt, Baseline(), 1, ()).first_logits
        )
    hook.remove()


def test_prompt_without_text_or_offsets_is_refused() -> None:
    model, bare = model_of(), [5, 6, 7, 8]
    for settings in (
        {"unit": "sentence"},
        {"unit": "sentence", "scoring": "sentences"},
        {"unit": "token", "scorer": "tiny"},
    ):
        with pytest.raises(
            ValueError, match=r"can do without the prompt's text: give these, or a lazyllm\.Prompt"
        ):
            lazyllm.generate(model, bare, PromptCompression(0.5, **settings), 1, ())
    without_spans = lazyllm.Prompt(torch.tensor(bare), "some text", (), ((0, 4),))
    with pytest.raises(
        ValueError, match="character ranges of 0 of its 4 tokens: the tokenizer gives no offsets"
    ):
        lazyllm.generate(model, without_spans, PromptCompression(0.5, "token"), 1, ())


def test_window_and_scorer_are_refused_before_a_model_loads() -> None:
    config = model_of().config
    PromptCompression(0.5, "sentence", window=512).check(config)
    with pytest.raises(ValueError, match="window=513: the scoring model sees at most 512"):
        PromptCompression(0.5, "sentence", window=513).check(config)
    PromptCompression(0.5, "sentence", scorer="tiny", window=4096).check(config)
    with pytest.raises(ValueError, match="at most 4096"):
        PromptCompression(0.5, "sentence", scorer="tiny", window=4097).check(config)
    with pytest.raises(lazyllm.UserError, match="'nosuch' is not a model"):
        PromptCompression(0.5, "sentence", scorer="nosuch").check(config)


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = model_of()
    check_same_as_model(model)
    model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(FloatingPointError, match="scoring model"):
        lazyllm.generate(model, text_prompt(), PromptCompression(0.5, "token"), 1, ())


@pytest.fixture(params=["mistral", "gpt2"])
def scorer(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, PreTrainedTokenizerFast]:
    """A random model in a folder, whose tokenizer cuts texts elsewhere: pairs of letters, a space
    after the word.

    GPT-2 has 16 positions, and lies there as on the hub: the weights of the model without its head,
        which is tied.
    """
    tokenizer = words_tokenizer(r"\w{1,2} ?|\s+|[^\w\s]{1,3}", TEXT)
    tokenizer.save_pretrained(tmp_path)
    if request.param == "gpt2":
        torch.manual_seed(9)
        sizes = dict(
            n_layer=2, n_embd=32, n_head=2, n_positions=16, vocab_size=120, initializer_range=0.5
        )
        GPT2LMHeadModel(
            GPT2Config(**sizes, bos_token_id=BOS, eos_token_id=BOS)
        ).transformer.save_pretrained(tmp_path)
    else:
        model = random_model(
            "mistral", 9, num_layers=2, float64_throughout=False, bos_token_id=BOS, vocab_size=120
        )
        model.save_pretrained(tmp_path)
    assert len(tokenizer) <= 120
    return str(tmp_path), tokenizer


@pytest.mark.parametrize("unit", ["token", "sentence"])
def test_another_model_scores_with_its_own_tokens(unit: str, scorer) -> None:
    name, tokenizer = scorer
    prompt, keep = text_prompt(), "0.4"
    out = lazyllm.generate(
        model_of(), prompt, PromptCompression(float(keep), unit, scorer=name), 3, ()
    )
    # its information, letter by letter
    may_go = slow_droppable(prompt)
    start, stop = prompt.spans[may_go[0]][0], prompt.spans[may_go[-1]][1]
    encoding = tokenizer(TEXT[start:stop], return_offsets_mapping=True, add_special_tokens=False)
    assert encoding["offset_mapping"] != [
        (a - start, b - start) for a, b in prompt.spans[may_go[0] : may_go[-1] + 1]
    ]
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64).eval()
    size, length = model.config.max_position_embeddings, 1 + len(encoding["input_ids"])  # with BOS
    own_info = slow(model, encoding["input_ids"], size, BOS)
    letter_info: dict[int, float] = {}
    for value, (a, b) in zip(own_info, encoding["offset_mapping"], strict=True):
        letter_info |= {start + place: value / (b - a) for place in range(a, b)}
    info = [
        sum(letter_info[place] for place in range(*prompt.spans[position])) for position in may_go
    ]
    chosen = slow_choice(
        info, slow_units(prompt, may_go, unit), math.ceil(Fraction(keep) * len(may_go))
    )
    stays = {may_go[index] for index in chosen}
    assert [position for position in may_go if position in out.selected[0][0]] == sorted(stays)
    assert out.scoring_s > 0
    stop = min(size, length)
    tokens = stop - 1  # without the last token of a window, whose logits are not needed
    while stop < length:  # each further window begins half a window before
        start = stop - size // 2
        stop = min(start + size, length)
        tokens += stop - 1 - start
    assert out.scoring_tokens == tokens
    assert out.pct_prompt_tokens_computed == pytest.approx(
        100 * (out.computed[0, 0] + out.scoring_tokens) / len(prompt)
    )


def test_flops_of_a_scorer_are_those_of_its_own_matrices(scorer) -> None:
    name, _ = scorer
    config = load_config(ModelSpec(name))
    width, layers, logits = (
        config.hidden_size,
        config.num_hidden_layers,
        2 * config.hidden_size * 120,
    )
    pairs = 4 * width * 10 * 11 // 2
    if config.model_type == "gpt2":  # q, k, v and o; up and down
        linear = 2 * 10 * (4 * width * width + 2 * width * 4 * width)
    else:
        linear = 10 * LayerShape.of(config).linear_flops
        pairs = LayerShape.of(config).pair_flops * 10 * 11 // 2
    # BOS and ten tokens, of which the last one is only predicted
    method = PromptCompression(0.5, "token", scorer=name)
    assert method.scoring_flops(model_of().config, 11) == layers * (linear + pairs) + 10 * logits


def test_scorer_is_loaded_once_and_before_the_clock(scorer, monkeypatch) -> None:
    name, _ = scorer
    loads: list[str] = []
    load_weights, now = other_models.load_weights, generation.read_clock

    def counted(*args, **kwargs):
        loads.append("load")
        return load_weights(*args, **kwargs)

    def clock(device):
        loads.append("clock")
        return now(device)

    monkeypatch.setattr(other_models, "load_weights", counted)
    monkeypatch.setattr(generation, "read_clock", clock)
    for _ in range(3):
        lazyllm.generate(
            model_of(), text_prompt(), PromptCompression(0.5, "token", scorer=name), 1, ()
        )
    assert loads == ["load"] + ["clock", "clock"] * 3
