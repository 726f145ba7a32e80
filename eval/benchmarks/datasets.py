"""What there is to evaluate on: every dataset, its task, its metric and how its prompts and answers are treated.

The facts are those of LongBench's `pred.py`, `eval.py` and `config/` (commit 2e00731, arXiv 2308.14508).
"""

from __future__ import annotations

from dataclasses import dataclass

TASKS = ("single_doc_qa", "multi_doc_qa", "summarization", "few_shot", "synthetic", "code")


@dataclass(frozen=True)
class Dataset:
    """One dataset, as the harness needs to know it.

    name: its name in configs, files and tables.
    task: the task (one of `TASKS`) whose score is the mean over its datasets.
    metric: a key of `eval.benchmarks.metrics.METRICS`.
    suite: where rows, templates and answer lengths come from: "longbench" or "embedded".
    chat_wrap: whether the prompt is wrapped in the model's chat template.
    first_line: whether only the first line of the answer is scored (leading newlines stripped first).
    newline_ends: whether a newline token ends the answer, which then has at least one token.
    protected: a pattern (re.MULTILINE) of what is not to be shortened in the context of a few-shot dataset: the
        examples' answers, and the labels that lay the examples out; "" where the context holds no examples.
    """

    name: str
    task: str
    metric: str
    suite: str = "longbench"
    chat_wrap: bool = True
    first_line: bool = False
    newline_ends: bool = False
    protected: str = ""


# "Question: ..." and "Type: ..." in turn, a line each
_TREC = r"^Question:|^Type:.*"
# "Passage:", lines of text, "Question:", a line, "Answer:", a line: only the text may be shortened, as a question here
# is what an example asks of its passage, and means little without its every word
_TRIVIAQA = r"^Passage:$|^Question:\n.*\nAnswer:\n.*"
# "Dialogue: ", lines of talk, "Summary: ", as a rule one line
_SAMSUM = r"^Dialogue:|^Summary:[\s\S]*?(?=^Dialogue:|\Z)"
# "Example", a sentence with its key, then the class and a full stop
_SHOTS = r"^Example| \S+$"


_ALL = (
    Dataset("narrativeqa", "single_doc_qa", "f1"),
    Dataset("qasper", "single_doc_qa", "f1"),
    Dataset("multifieldqa_en", "single_doc_qa", "f1"),
    Dataset("hotpotqa", "multi_doc_qa", "f1"),
    Dataset("2wikimqa", "multi_doc_qa", "f1"),
    Dataset("musique", "multi_doc_qa", "f1"),
    Dataset("gov_report", "summarization", "rouge"),
    Dataset("qmsum", "summarization", "rouge"),
    Dataset("multi_news", "summarization", "rouge"),
    Dataset("trec", "few_shot", "classification", chat_wrap=False, first_line=True, protected=_TREC),
    Dataset("triviaqa", "few_shot", "f1", chat_wrap=False, first_line=True, protected=_TRIVIAQA),
    Dataset("samsum", "few_shot", "rouge", chat_wrap=False, first_line=True, newline_ends=True, protected=_SAMSUM),
    Dataset("passage_count", "synthetic", "count"),
    Dataset("passage_retrieval_en", "synthetic", "retrieval"),
    Dataset("lcc", "code", "code_similarity", chat_wrap=False),
    Dataset("repobench-p", "code", "code_similarity", chat_wrap=False),
    Dataset("lookup", "single_doc_qa", "f1", "embedded", chat_wrap=False),
    Dataset("hops", "multi_doc_qa", "f1", "embedded", chat_wrap=False),
    Dataset("digest", "summarization", "rouge", "embedded", chat_wrap=False),
    Dataset("shots", "few_shot", "classification", "embedded", chat_wrap=False, first_line=True, protected=_SHOTS),
    Dataset("retrieve", "synthetic", "retrieval", "embedded", chat_wrap=False),
    Dataset("complete", "code", "code_similarity", "embedded", chat_wrap=False),
)

DATASETS: dict[str, Dataset] = {dataset.name: dataset for dataset in _ALL}
