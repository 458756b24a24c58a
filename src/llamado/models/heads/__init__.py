"""Draft heads: small models that predict tokens from the hidden states of a target model."""
