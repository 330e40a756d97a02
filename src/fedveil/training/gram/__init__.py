"""Train linear models in the span of their records, by Gram matrices."""
