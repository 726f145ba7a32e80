"""Tables: all methods on one clock, their authors' claims, LazyLLM's own tables, and those its reviewers asked for.

Every table needs stored results only. Rows are joined by key: model, suite, method, settings, task.
"""

from collections.abc import Callable

from eval.paper.table import Table
from eval.paper.tables.beside_paper import table1, table2
from eval.paper.tables.by_group import groups
from eval.paper.tables.by_turn import turns
from eval.paper.tables.claims import claims
from eval.paper.tables.effective_keep import effective_keep
from eval.paper.tables.evidence_lost import evidence
from eval.paper.tables.memory_held import memory
from eval.paper.tables.one_clock import field
from eval.paper.tables.ranking import ranking
from eval.paper.tables.schedules import sensitivity
from eval.paper.tables.ttft_by_length import ttft_share
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
