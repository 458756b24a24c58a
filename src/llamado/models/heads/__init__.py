"""Small models that draft from the hidden states of a larger one."""
