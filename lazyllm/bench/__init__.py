"""How fast, against the model itself and against the arithmetic: `python -m lazyllm.bench`.

`__main__` is the command line, `shapes` the models, `steered` LazyLLM with revivals by plan, `clock` takes the times,
`cases` are the samples and their ratios, `case_table` and `targets` show them. Needs torch and transformers only.
"""
