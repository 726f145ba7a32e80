"""One HTML page of stored runs: `lazyllm-bench report RUNS [RUNS ...] [--out FILE]`.

`page.render` assembles the runs and their provenance (`overview`), tables and figures, every example's answers
(`record_browser`) and the drawings of traced examples (`trace_view`). The page is one file without references to
others; its scripts are `*.js`, its style `report.css`, its frame `page.html.jinja`.
"""
