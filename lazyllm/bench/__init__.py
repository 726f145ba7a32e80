"""Speed on random weights: `lazyllm-bench bench`. Needs torch and transformers only.

`__main__` is the command line, `shapes` the models, `steered` LazyLLM with planned revivals, `clock` the measuring,
`cases` the samples and their ratios; `case_table` and `targets` show them.
"""
