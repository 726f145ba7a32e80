"""Official rows, scored answers and Llama 2's tokenizer, which lie beside the repository and
never in it.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

SHARED = ROOT.parent / "shared"
LONGBENCH, RULER, LLAMA2 = SHARED / "longbench", SHARED / "ruler", SHARED / "tokenizers" / "llama2"


def needs(path: Path) -> pytest.MarkDecorator:
    """Skip a test, with the reason, if the shared material is missing."""
    return pytest.mark.skipif(
        not path.exists(), reason=f"../shared/{path.relative_to(SHARED)} is absent"
    )


@cache
def shared_rows(folder: str = "") -> dict[str, list[dict[str, Any]]]:
    """{dataset: rows} of ../shared/longbench or of a folder in it; empty if it is missing."""
    files = sorted((LONGBENCH / folder).glob("*.jsonl"))
    return {
        file.stem: [json.loads(line) for line in file.read_bytes().split(b"\n") if line]
        for file in files
    }


@cache
def llama2() -> Any:
    """Llama 2's tokenizer, as this project loads it."""
    from lazyllm.models.tokenizers import load_tokenizer

    return load_tokenizer(LLAMA2)


@cache
def sentencepiece() -> Any:
    """Llama 2's tokenizer by the sentencepiece library itself."""
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=str(LLAMA2 / "tokenizer.model"))
