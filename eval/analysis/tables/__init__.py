"""Tables: all methods on one clock, their authors' claims, LazyLLM's own tables, and those its reviewers asked for.

Every table needs stored results only. Rows are joined by key: model, suite, method, settings, task.
"""

from collections.abc import Callable

from eval.analysis.table import Table
from eval.analysis.tables.beside_paper import table1, table2
from eval.analysis.tables.by_group import groups
from eval.analysis.tables.by_turn import turns
from eval.analysis.tables.claims import claims
from eval.analysis.tables.effective_keep import effective_keep
from eval.analysis.tables.evidence_lost import evidence
from eval.analysis.tables.memory_held import memory
from eval.analysis.tables.one_clock import field
from eval.analysis.tables.ranking import ranking
from eval.analysis.tables.schedules import sensitivity
from eval.analysis.tables.ttft_by_length import ttft_share
from eval.store.results import Results

TABLES: dict[str, Callable[[Results], Table]] = {
    "field": field,
    "claims": claims,
    "table1": table1,
    "table2": table2,
    "groups": groups,
    "turns": turns,
    "memory": memory,
    "ttft_share": ttft_share,
    "sensitivity": sensitivity,
    "ranking": ranking,
    "effective_keep": effective_keep,
    "evidence": evidence,
}
