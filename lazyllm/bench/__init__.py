"""How fast, against the model itself and against the arithmetic: `python -m lazyllm.bench`.

`__main__` is the command line, `shapes` the models, `steered` LazyLLM with revivals by plan, `clock` takes the times,
`ratios` are what they say, `case_table` and `targets` show them. Needs torch and transformers only.
"""
