"""packax with other projects' calling conventions: docs/guide/integrations.md.

Each module is imported separately (`from packax.integrations import flax`), so that importing
packax needs none of these projects. No module copies code: they compute packax's attention.
"""
