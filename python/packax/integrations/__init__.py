"""packax behind other projects' calling conventions: docs/guide/integrations.md.

Each module is imported by itself (`from packax.integrations import flax`), so that importing packax
needs none of them. None copies code: what they compute is packax's attention.
"""
