"""One HTML page of stored runs, for reading and passing on: `lazyllm-bench report RUNS [RUNS ...] [--out FILE]`.

`page.render` puts together what the other files make: the runs and their provenance (`overview`), tables (`tables`),
figures (`pictures`), every example's answers (`records`) and the drawings of traced examples (`traces`). The page is
one file without a reference to any other; its scripts are `*.js`, its style `report.css`, its frame `page.html.jinja`.
"""
