"""`python -m packax demo`: trains a small byte-level transformer on packed documents, and checks it.

`data` packs the documents, `model` is the transformer, `train` the loop, `checks` the proof, `plots` the pictures. Nothing in
packax imports this package; it needs the extra `demo` (optax, tqdm, matplotlib).
"""
