"""SCBench (arXiv 2412.10319): several questions on one long context, each asked after the answer to the last.

`data.dir=FOLDER` gives a folder with the official `<task>.jsonl` and `eval_utils.py`. Without it, rows come through the
package `datasets` (`microsoft/SCBench`), and prompts from a commit of MInference's repository; only the prompts of that
file are read, and checked by sha256. Prompts, answer lengths and scores are those of `eval_utils.py` (commit a045846)
and `compute_scores.py` (9987de6) in multi-turn mode.

Ours differs in four points:
- The model's own answer stands in place of the gold one; `--disable_golden_context` also words plain prompts otherwise.
- In a chat template, each later question of mf asks for its own number, not for the last turn's.
- A prompt is cut in the middle before the chat template is put around it, not after.
- All turns of summary_with_needles may have 800 tokens; officially, turns that ask for a needle have 15.
"""

import re
from functools import partial
from typing import Any

from eval.benchmarks.downloads import HubDataset, literals, official_file
from eval.benchmarks.prompts import tokenizer_for_rows
from eval.benchmarks.rows import (
    FILLED,
    Check,
    check_fields,
    is_filled,
    is_texts,
    loaded,
    one_of,
    prompt_parts,
    sha256_of,
)
from eval.benchmarks.suite import Dataset, DataSettings, Example, LoadedDataset, Suite, Turn, register
from lazyllm.errors import UserError

PROMPTS = "eval_utils.py"
PROMPTS_URL = "https://raw.githubusercontent.com/microsoft/MInference/a045846dcf55e28650b2d6be49a4407f9645a4d7/scbench/eval_utils.py"
PROMPTS_SHA256 = "069629206c915778f4cfe0175ace7203869557b9bf8e31a565ea54dc6c03c3d3"  # of `prompts_sha256`

TASKS = {  # task: (what it tests, the metric, most tokens of an answer)
    "scbench_kv": ("string_retrieval", "substring", 150),
    "scbench_prefix_suffix": ("string_retrieval", "substring", 150),
    "scbench_vt": ("string_retrieval", "share_of_substrings", 30),
    "scbench_qa_eng": ("semantic_retrieval", "substring_any_case", 40),
    "scbench_qa_chn": ("semantic_retrieval", "character_f1", 40),
    "scbench_choice_eng": ("semantic_retrieval", "choice", 40),
    "scbench_many_shot": ("global_information", "any_character", 10),
    "scbench_mf": ("global_information", "number", 5),
    "scbench_summary": ("global_information", "rouge_lsum", 200),
    "scbench_summary_with_needles": ("multi_tasking", "rouge_lsum_or_number", 800),
}
_LEFT_OUT = {"scbench_repoqa": "semantic_retrieval", "scbench_repoqa_and_kv": "multi_tasking"}

# Names in the official file: the first prompt, a later one as plain text, a later one in a chat template
_NAMES = (
    "multiturn_templates",
    "multiturn_follow_up_templates",
    "multiturn_follow_up_templates_in_chat_tempate",
)
_PLACES = {"input", "question", "prefix", "OPTION_A", "OPTION_B", "OPTION_C", "OPTION_D"}
_HUB = HubDataset("microsoft/SCBench", f"SCBench's <task>.jsonl and {PROMPTS}")
_ASKED = re.compile("The .+ is")  # what mf's questions ask for
_PARTS = ("scbench_summary", "scbench_passkey")  # the tasks of the turns of summary_with_needles


def missing(dataset: Dataset, settings: DataSettings) -> str | None:
    """Why the rows are not available or cannot be scored; None if they can."""
    if dataset.name in _LEFT_OUT:
        return "its official score needs a parser of six languages (tree-sitter), which this package does not include"
    if settings.dir is None:
        return _HUB.absent()
    file = settings.dir.expanduser() / f"{dataset.name}.jsonl"
    return None if file.is_file() else f"data.dir={settings.dir} holds no <task>.jsonl for it"


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """A task's rows, from a folder or `datasets`. Raises UserError for an unusable row (unless skipped) or file."""
    content = official_file("SCBench", PROMPTS, PROMPTS_URL, PROMPTS_SHA256, settings.dir, _HUB.give, prompts_sha256)
    first, plain, in_chat = (prompts[dataset.name] for prompts in _parsed_prompts(content))
    is_wrapped = _is_wrapped(settings)
    prefix = "This paper" if is_wrapped and dataset.name == "scbench_summary" else ""
    prompts = first, in_chat if is_wrapped else plain, prefix
    rows = _HUB.rows(settings, f"{dataset.name}.jsonl", dataset.name, "test")
    parse = partial(_example, dataset, prompts)
    return loaded(dataset, rows, parse, settings.on_error, TASKS[dataset.name][2], prompts)


def prompts_sha256(content: bytes) -> str:
    """The sha256 of the prompts in `eval_utils.py` for `TASKS`. Raises UserError if it has none."""
    kinds = _parsed_prompts(content)
    return sha256_of({task: [prompts[task] for prompts in kinds] for task in TASKS})


SUITE = register(
    Suite(
        name="scbench",
        datasets=(
            *(
                Dataset(name, task, metric, suite="scbench", decode_halves=False)
                for name, (task, metric, _) in TASKS.items()
            ),
            *(Dataset(name, task, "function_match", suite="scbench") for name, task in _LEFT_OUT.items()),
        ),
        load=load,
        check=missing,
    )
)


def _is_wrapped(settings: DataSettings) -> bool:
    """Whether messages are put into a chat template."""
    chat = settings.chat
    if chat.or_none:
        return chat.uses_template(tokenizer_for_rows(settings.model, "scbench"))
    return chat.from_tokenizer or bool(chat.before + chat.after)


def _parsed_prompts(content: bytes) -> list[dict[str, str]]:
    """The dictionaries `_NAMES` of the official file: {task: its prompt}; the file's code is not run."""
    try:
        prompts = literals(content, *_NAMES)
        for name, by_task in zip(_NAMES, prompts, strict=True):
            fields = dict.fromkeys(_PLACES | {"context" if name == _NAMES[0] else "pre_ans"}, "")
            for task in TASKS:
                by_task[task].format(**fields)
        if not all("{context}" in prompts[0][task] for task in TASKS):
            raise ValueError("a first prompt without {context}")
    except (SyntaxError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{PROMPTS}: holds no prompts of SCBench's ({error}); expected scbench/{PROMPTS}") from error
    return prompts


_CONTEXT: Check = (  # mf's is a list of numbers
    lambda value: is_filled(value) or (isinstance(value, list) and {*map(type, value)} == {int}),
    "a string that is not empty",
)
_TURNS: Check = (lambda value: isinstance(value, list) and bool(value), "a list of turns")
_OPTIONS: Check = (lambda value: is_texts(value) and len(value) == 4, "4 strings")
_ASKS: Check = _ASKED.search, "a text that names what it asks for, as 'The ... is'"
# {metric: check}, if the answer is not a string
_ANSWERS: dict[str, Check] = {
    "share_of_substrings": (lambda value: is_texts(value) and all(value) and bool(value), "a list of strings"),
    "number": (lambda value: type(value) in (int, float), "a number"),
}


def _example(dataset: Dataset, prompts: tuple[str, str, str], row: Any, number: int) -> Example:
    """prompts: the first one, with {context} in it; that of later messages; the text after those."""
    first, later, prefix = prompts
    name = "input" if isinstance(row, dict) and "input" in row and "context" not in row else "context"
    check_fields(row, {name: _CONTEXT, "multi_turns": _TURNS})
    context = str(row[name])
    asked = [_question(dataset, place, turn) for place, turn in enumerate(row["multi_turns"], 1)]
    evidence = [()] * len(asked)
    if dataset.metric == "substring":
        evidence = [tuple(found.span() for found in re.finditer(re.escape(golds[0]), context)) for _, golds in asked]
    fields, answers = asked[0]
    before, behind = prompt_parts(first, fields)
    return Example(
        dataset=dataset.name,
        id=f"{dataset.name}-{number}",  # as officially
        instruction=before,
        context=context,
        input=behind,
        answers=answers,
        length=len(context),
        evidence=evidence[0],
        turns=tuple(
            Turn(later.format(**fields, pre_ans=""), golds, prefix, spans)
            for (fields, golds), spans in zip(asked[1:], evidence[1:], strict=True)
        ),
        official=row,
    )


def _question(dataset: Dataset, number: int, turn: Any) -> tuple[dict[str, str], tuple[str, ...]]:
    """The values of a prompt's placeholders in one turn, and its gold answers."""
    try:
        check_fields(turn, {"input": FILLED, "answer": _ANSWERS.get(dataset.metric, FILLED)})
        text, answer = turn["input"], turn["answer"]
        fields = {"input": text, "question": text}
        if dataset.metric == "choice":  # both the text and the letter of the right option are gold answers
            check_fields(turn, {"options": _OPTIONS})
            check_fields(turn, {"answer": one_of(turn["options"])})
            options = dict(zip("ABCD", turn["options"], strict=True))
            letter = "ABCD"[turn["options"].index(answer)]
            return fields | {f"OPTION_{name}": option for name, option in options.items()}, (answer, letter)
        if dataset.name == "scbench_mf":
            check_fields(turn, {"input": _ASKS})
            return fields | {"prefix": f"What is {_ASKED.findall(text)[0].lower()[:-3]}?"}, (str(answer),)
        if dataset.metric == "rouge_lsum_or_number":
            check_fields(turn, {"task": one_of(_PARTS)})
            if answer.isdigit() != (turn["task"] == _PARTS[1]):
                raise UserError(f"field 'answer' must be a number for {_PARTS[1]} and only for it")
    except UserError as error:
        raise UserError(f"turn {number} of field 'multi_turns': {error}") from error
    return fields, tuple(answer) if isinstance(answer, list) else (answer,)
