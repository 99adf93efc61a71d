"""`python -m packax demo`: trains a small byte-level transformer on packed documents and checks it.

`data` packs the documents, `model` is the transformer, `train` the training loop, `checks` tests
the trained model, `plots` draws pictures, and `run` runs everything. The demo needs the extra
`demo` (optax, tqdm, matplotlib).
"""
