"""How fast, against the model itself and against the arithmetic: `python -m lazyllm.bench`.

`__main__` is the command line, `shapes` the models, `steered` LazyLLM with revivals by plan, `measure` the clock, and
`report` the table. Needs torch and transformers only.
"""
