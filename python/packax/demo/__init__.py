"""`python -m packax demo`: trains a small byte-level transformer on packed documents, checks it.

`data` packs the documents, `model` is the transformer, `train` the loop, `checks` the proof,
`plots` the pictures, `run` all of it. It needs the extra `demo` (optax, tqdm, matplotlib).
"""
