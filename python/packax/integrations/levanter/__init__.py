"""packax as the attention of Levanter's layers and of Grug: see "Levanter" in the documentation."""

from packax.integrations.levanter.grug import attention as attention
from packax.integrations.levanter.grug import build_mask as build_mask
from packax.integrations.levanter.install import install as install
from packax.integrations.levanter.layers import dot_product_attention as dot_product_attention
